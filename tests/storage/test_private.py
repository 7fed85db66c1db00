"""Folders in places where others may write must be ours: another user's link is not followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.engine.local.cluster import runtime_folder
from everstep.errors import StorageAccessError, StorageError
from everstep.storage.private import private_folder
from everstep.storage.restore import default_cache


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder that is the only one there is."""
    place = Path(f"/tmp/{tmp_path.name[-12:]}-{os.getpid()}")
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: "/proc/no-home")
    yield place
    for path in sorted(place.rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() or path.is_file() else path.rmdir()
    place.rmdir()


@pytest.mark.parametrize(
    ("name", "ask", "variable"),
    [
        ("everstep-{}", runtime_folder, "XDG_RUNTIME_DIR"),
        ("everstep-cache-{}", default_cache, "XDG_CACHE_HOME"),
    ],
)
def test_a_link_that_somebody_else_put_there_is_not_followed(
    crowded: Path, name: str, ask: Callable[[], Path], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable == "XDG_CACHE_HOME":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    # It leads to a folder of our own, where nothing of Everstep's should ever be written.
    secrets = crowded / "secrets"
    secrets.mkdir(mode=0o700)
    (crowded / name.format(os.getuid())).symlink_to(secrets)
    with pytest.raises(StorageAccessError, match=f"is a link or a file.*{variable}"):
        ask()
    assert list(secrets.iterdir()) == []


def test_a_folder_that_others_can_look_into_is_refused(crowded: Path) -> None:
    (crowded / f"everstep-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(StorageAccessError, match="not this user's alone"):
        runtime_folder()


def test_a_folder_that_can_not_be_made_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be written to: No such file or directory.*set WHERE"):
        private_folder(tmp_path / "missing" / "ours", "WHERE")
