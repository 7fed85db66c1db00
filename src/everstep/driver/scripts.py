"""A script that is trained with as it is: ``everstep run``."""

from __future__ import annotations

from everstep.agent.script import ScriptRun
from everstep.backend.jax import JaxScriptBackend
from everstep.backend.script import ScriptBackend
from everstep.config import RunConfig, ScalingConfig
from everstep.driver.output_files import OutputFiles
from everstep.driver.run import RunSpec, run_training


def launch(
    script: str,
    *,
    is_module: bool,
    framework: str,
    scaling: ScalingConfig,
    run: RunConfig,
    engine: object,
    output: OutputFiles,
) -> None:
    """Run it on workers, until it has ended in all of them."""
    restarts = run.failure_config.max_failures
    run_training(
        RunSpec(
            train_fn=ScriptRun(script, is_module=is_module),
            train_loop_config=None,
            datasets={},
            backend=JaxScriptBackend() if framework == "jax" else ScriptBackend(restarts),
            scaling=scaling,
            run=run,
            engine=engine,
            output=output,
        )
    )
