"""Sockets and run folders are the user's alone, and nothing listens on TCP but what a framework needs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import psutil

from everstep import Checkpoint, RunConfig, ScalingConfig, Trainer, get_context, report
from everstep.engine.local.cluster import runtime_folder


def test_everything_on_disk_is_the_users_alone_and_no_tcp_port_is_open(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> list[Any]:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "weights").write_text("w")
            report({"x": 1}, checkpoint=Checkpoint.from_directory(folder))
        worker = psutil.Process()
        # The worker, its template, its agent and its driver.
        everybody = [worker, *worker.parents()[:3]]
        listening = [
            f"{process.name()} {connection.laddr}"
            for process in everybody
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        return [listening, [process.cmdline()[-1] for process in everybody], get_context().get_world_rank()]

    result = Trainer(
        function,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="private", storage_path=str(tmp_path)),
    ).fit()
    assert result.return_value[0] == []
    open_to_others = [
        str(path)
        for root in (Path(result.path), runtime_folder())
        for path in [root, *root.rglob("*")]
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and path.is_dir()
    ]
    assert open_to_others == []
    assert stat.S_IMODE(os.stat(result.path).st_mode) == 0o700
