"""How the API server is found, and who we are to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from everstep.kube import api
from everstep.kube.api import Api, NoCluster
from processes import wait_for


def kubeconfig(folder: Path, **user: Any) -> str:
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "there",
        "clusters": [{"name": "there", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "there", "context": {"cluster": "there"}}],
    }
    if user:
        config["users"] = [{"name": "me", "user": user}]
        config["contexts"][0]["context"]["user"] = "me"
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return str(path)


def test_where_there_is_no_cluster_it_is_said_where_was_looked_and_what_to_do(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with pytest.raises(NoCluster, match=r"no kubeconfig at .*nothing: name one with --kubeconfig"):
        asyncio.run(Api.connect(missing))
    broken = tmp_path / "broken"
    broken.write_text("{{{")
    with pytest.raises(NoCluster, match=r"(?s)found in .*broken.*kubectl cluster-info"):
        asyncio.run(Api.connect(str(broken)))
    with pytest.raises(NoCluster, match="elsewhere"):
        asyncio.run(Api.connect(kubeconfig(tmp_path), "elsewhere"))


def test_a_kubeconfig_needs_no_user(tmp_path: Path) -> None:
    async def connect() -> None:
        async with await Api.connect(kubeconfig(tmp_path)) as connected:
            await connected._refreshing

    asyncio.run(connect())


def test_tokens_that_run_out_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_REFRESH_S", 0.01)
    plugin = tmp_path / "plugin"
    plugin.write_text(
        "#!/bin/sh\n"
        f"echo x >> {tmp_path}/asked\n"
        f"asked=$(wc -l < {tmp_path}/asked)\n"
        'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",'
        ' "status": {"token": "token-\'$asked\'", "expirationTimestamp": "2020-01-01T00:00:00Z"}}\'\n'
    )
    plugin.chmod(0o755)
    exec_ = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}

    async def connect() -> None:
        async with await Api.connect(kubeconfig(tmp_path, exec=exec_)) as connected:
            keys = connected.configuration.api_key
            await asyncio.to_thread(
                wait_for, lambda: keys["BearerToken"] != "Bearer token-1", "another token"
            )

    asyncio.run(connect())
