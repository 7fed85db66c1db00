"""Runs the Python blocks of pages: ``python running.py PAGE…``, each page in a process forked from one that
has imported the frameworks.

The blocks of a page share their names, as they would in a notebook. What a page takes for granted (a model, a
data set) is in ``GIVEN``.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.pages import Block, blocks

_ONCE = (
    "torch._dynamo",
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
)
"""What several pages import, and what takes seconds."""

SEPARATELY = {"README.md", "docs/tutorial.md", "docs/data.md"}
"""Pages whose code has tests of its own, with real workers."""

_TORCH = """
import os
import torch
os.environ["WANDB_DISABLED"] = "true"
def build(): return torch.nn.Linear(2, 1), None
"""
_LIBRARIES = """
import torch

def build_model():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=1))

def arguments():
    from transformers import TrainingArguments
    return TrainingArguments(output_dir="out", max_steps=2, save_strategy="no", use_cpu=True, report_to=[])

def build_module():
    import lightning.pytorch as pl
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            return self.layer(batch["input_ids"].float()).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)
    return Module()

class Words(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return {"input_ids": torch.arange(4), "labels": torch.arange(4)}

load_dataset = Words
"""
_TUNE = """
from everstep import RunConfig
from everstep.torch import TorchTrainer

RUNS = "runs"

def train_loop(config):
    import everstep
    everstep.report(config)

class tune:  # one trial of Ray Tune, without its cluster
    def grid_search(values): return values[0]
    def get_context(): return tune
    def get_trial_id(): return "trial-1"
    def report(metrics): assert metrics == {"lr": 0.1}, metrics
    class Tuner:
        def __init__(self, trial, param_space): self.run = lambda: trial(param_space)
        def fit(self): self.run()
"""
GIVEN = {
    "docs/from-ray-train.md": _TUNE,
    "docs/from-torchft.md": "def train_loop(*arguments): pass\n",
    "docs/replica-groups.md": "def train_fn(): pass\n",
    "docs/ray.md": "def train_fn(): pass\n",
    "docs/tpu.md": "def train_fn(): pass\n",
    "docs/your-script.md": _LIBRARIES,
    "docs/transformers-and-lightning.md": _LIBRARIES,
    "docs/watching.md": """
import os
from pathlib import Path
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
os.environ["MLFLOW_TRACKING_URI"] = Path("mlruns").absolute().as_uri()
""",
    "docs/state.md": _TORCH
    + """
import json, safetensors.torch
model = torch.nn.Linear(2, 1)
os.mkdir("checkpoint_0001_000120")
safetensors.torch.save_file(
    {f"model/module.{name}": tensor for name, tensor in model.state_dict().items()},
    "checkpoint_0001_000120/state-shared.safetensors",
)
""",
}


def _fit_here() -> None:
    """Trainers of frameworks run their function in this process; those that need what this machine doesn't
    have are only made.
    """
    from everstep import ScalingConfig, Trainer

    original = Trainer.fit

    def fit(trainer: Any) -> Any:
        scaling = trainer.scaling_config
        if scaling.use_gpu or scaling.use_tpu or trainer.engine == "ray":
            return None
        if type(trainer) is not Trainer:
            trainer.scaling_config = ScalingConfig(num_workers=0)
        return original(trainer)

    Trainer.fit = fit  # type: ignore[method-assign]


def _execute(code: str, block: Block, names: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), names)


def run(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(GIVEN.get(page, ""), names)
    for block in blocks(page):
        if block.language == "python":
            _execute(block.code, block, names)
        elif block.language == "diff":
            compile(block.before, block.page, "exec")
            _execute(block.after, block, names)


def main(pages: list[str]) -> int:
    gc.disable()  # imports make no garbage, and looking for it is a sixth of their time
    for module in _ONCE:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()

    failed = 0
    for page in pages:
        child = os.fork()
        if child == 0:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    os.chdir(folder)
                    os.environ["HOME"] = folder  # where runs are kept that aren't told where
                    _fit_here()
                    run(page)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(f"FAILED: {page}", flush=True)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
