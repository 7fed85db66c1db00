"""A node of a Ray cluster under a process of its own, which may be in a namespace of its own.

Started with what the node is like (JSON); says its id, and ends it when its standard input does.
"""

from __future__ import annotations

import json
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams


def main(asked: str) -> None:
    node = Node(
        RayParams(
            **json.loads(asked),
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
            include_log_monitor=False,
            dashboard_agent_listen_port=None,
        ),
        head=False,
        shutdown_at_exit=True,
        spawn_reaper=True,
    )
    print(f"node {node.node_id}", flush=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
