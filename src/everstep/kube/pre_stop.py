"""What a worker does when its Pod is deleted: it has Ray drain the node, so that training there can save
itself.

For Everstep that is a preemption notice, which leads to a checkpoint. The hook ends as soon as
nothing runs there any more, at the latest shortly before the Pod's grace is over.
"""

from __future__ import annotations

from everstep.kube.spec import Manifest

_GRACE_S = 30
_MARGIN_S = 5
_SCRIPT = """
import os, time
me = os.environ["RAY_CLOUD_INSTANCE_ID"]
idle = (b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
def read(pid, name):
    try:
        return open(f"/proc/{pid}/{name}", "rb").read()
    except OSError:
        return b""
def busy():
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    raylets = [pid for pid in pids if b"raylet/raylet" in read(pid, "cmdline")]
    raylets = {pid for pid in raylets if me.encode() in read(pid, "environ")}
    for pid in pids:
        name, stat = read(pid, "cmdline"), read(pid, "stat").rpartition(b")")[2].split()
        if name.startswith(b"ray::") and not name.startswith(idle) and stat[1].decode() in raylets:
            return True
deadline = time.time() + SECONDS
if busy():
    from ray._raylet import GcsClient
    gcs = GcsClient(address=os.environ["RAY_ADDRESS"])
    for node, info in gcs.get_all_node_info().items():
        if info.instance_id == me and info.state == 0:
            gcs.drain_node(node.hex(), 2, "the Pod is told to leave", int(deadline * 1000))
    while busy() and time.time() < deadline:
        time.sleep(0.5)
"""


def say_goodbye(spec: Manifest, ray: Manifest) -> None:
    """Unless the template has a hook of its own."""
    seconds = int(spec.get("terminationGracePeriodSeconds") or _GRACE_S) - _MARGIN_S
    if seconds <= 0 or "preStop" in (ray.get("lifecycle") or {}):
        return
    script = _SCRIPT.replace("SECONDS", str(seconds)).strip()
    ray.setdefault("lifecycle", {})["preStop"] = {"exec": {"command": ["python", "-c", script]}}
