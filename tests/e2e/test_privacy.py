"""Sockets and run folders are the user's alone, and nothing listens on TCP but what a framework needs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from everstep import Result
from everstep.engine.local.cluster import runtime_folder

# A driver of its own: what other tests have opened in this process is not what is looked for.
SCRIPT = """
import sys, tempfile
from pathlib import Path

import psutil
from everstep import Checkpoint, RunConfig, ScalingConfig, Trainer, report

def function():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_text("w")
        report({"x": 1}, checkpoint=Checkpoint.from_directory(folder))
    worker = psutil.Process()
    # The worker, its template, its agent, its guardian and its driver.
    return [
        f"{process.name()} {connection.laddr}"
        for process in [worker, *worker.parents()[:4]]
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]

result = Trainer(
    function,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="private", storage_path=sys.argv[1]),
).fit()
assert result.return_value == [], result.return_value
"""


def test_everything_on_disk_is_the_users_alone_and_no_tcp_port_is_open(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = Result.from_path(str(tmp_path / "private"))
    open_to_others = [
        str(path)
        for root in (Path(result.path), runtime_folder())
        for path in [root, *root.rglob("*")]
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and path.is_dir() and not path.is_symlink()
    ]
    assert open_to_others == []
    assert stat.S_IMODE(os.stat(result.path).st_mode) == 0o700
