"""Getting a host ready for a run: a template that has loaded the function, and storage that can be seen."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.agent.drivers import Holder
from everstep.agent.spawner import Recipe, TemplateProcess
from everstep.errors import signal_name
from everstep.failures import Kind
from everstep.process import kernel
from everstep.protocol import template_messages, wire
from everstep.storage.schemes import BUCKETS

_STORAGE_VARIABLES = tuple(scheme.environment for scheme in BUCKETS.values())
"""What the names of the variables begin with that stores take options from."""


class Preparation:
    """The template, and what is known of it. ``on_message`` is called with its messages about workers."""

    def __init__(
        self, folder: Path, holder: Holder, on_message: Callable[[template_messages.AnyMessage], None]
    ) -> None:
        self.template: TemplateProcess | None = None
        self.loaded: template_messages.Loaded | None = None
        self._folder = folder
        self._holder = holder
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._checking: wire.Prepare | None = None
        """The order whose storage is being checked, or has failed the check."""

    def prepare(self, message: wire.Prepare) -> None:
        try:
            message = _at_home(message) if message.elsewhere else message
            self._have_template(self._recipe(message))
        except OSError as error:
            self._holder.send(wire.Unprepared(Kind.START, _why_not_started(error, message.cwd), ""))
            return
        # What we read and write for our workers goes to the same place, with the same rights.
        os.environ.update({k: v for k, v in message.env.items() if k.startswith(_STORAGE_VARIABLES)})
        # Beside the template's imports, which take longer.
        self._checking = message
        threading.Thread(target=self._check_storage, args=(message,), daemon=True).start()

    def _recipe(self, message: wire.Prepare) -> Recipe:
        # Where frameworks may keep what they compiled: this machine's, and gone with its last host.
        cache = self._folder.parent / "cache"
        cache.mkdir(mode=0o700, exist_ok=True)
        load = template_messages.Load(
            message.code,
            message.config,
            message.python_path,
            message.preload,
            message.probe_s,
            hasattr(os, "pidfd_open"),
            message.script,
        )
        # All that a worker starts inherits the mark, and is found by it if the guardian was killed, too.
        env = {**message.env, "EVERSTEP_CACHE": str(cache), kernel.HOST_MARK: str(self._folder)}
        return Recipe(load, env, message.cwd)

    def _have_template(self, recipe: Recipe) -> None:
        if self.template is None or self.template.recipe != recipe:
            self.close()
            self.template = TemplateProcess(recipe, self._on_template_message)

    def template_for_worker(self) -> TemplateProcess:
        """The one that forks; or, where that isn't safe, a process that becomes the worker itself."""
        assert self.template is not None, "workers start on prepared hosts only"
        assert self.loaded is not None, "workers start on prepared hosts only"
        if self.loaded.forks:
            return self.template
        recipe = self.template.recipe
        load = msgspec.structs.replace(recipe.load, may_fork=False)
        return TemplateProcess(Recipe(load, recipe.env, recipe.cwd), self._on_template_message)

    def _on_template_message(self, template: TemplateProcess, message: template_messages.AnyMessage) -> None:
        match message:
            case template_messages.Loaded():
                if template is self.template:
                    self.loaded = message
                    self._check_prepared()
            case template_messages.LoadFailed():
                self._holder.send(wire.Unprepared(Kind.LOAD, message.message, message.traceback))
            case _:
                self._on_message(message)

    def _check_storage(self, message: wire.Prepare) -> None:
        from everstep.errors import StorageAccessError, StorageError
        from everstep.storage.shared import find_marker
        from everstep.storage.store import open_store

        refusal: wire.Unprepared | None = None
        try:
            run = open_store(message.run_folder, message.storage_options, message.storage_limits)
            find_marker(run, message.marker)
        except (StorageError, OSError) as error:
            kind = Kind.STORAGE if isinstance(error, StorageAccessError) else Kind.START
            refusal = wire.Unprepared(kind, str(error), "")
        self._loop.call_soon_threadsafe(self._storage_checked, message, refusal)

    def _storage_checked(self, message: wire.Prepare, refusal: wire.Unprepared | None) -> None:
        if message is not self._checking:
            return  # another order came meanwhile
        if refusal is not None:
            self._holder.send(refusal)
            return
        self._checking = None
        self._check_prepared()

    def _check_prepared(self) -> None:
        if self.loaded is not None and self._checking is None:
            self._holder.send(wire.Prepared(self.loaded.forks, self.loaded.why_not, self.loaded.seconds))

    def template_died(self, status: int) -> TemplateProcess:
        """The kernel has reported its exit. Returns the template, with its last messages read."""
        assert self.template is not None
        template, self.template, self.loaded = self.template, None, None
        template.drain()
        template.close()
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        self._holder.send(wire.Unprepared(Kind.TEMPLATE, f"the template process died ({how})", ""))
        return template

    def repeat_failure(self) -> None:
        """To a later driver: it must not count on a template that died while there was none."""
        if self.loaded is None:
            died = "its template process had died, or was not ready, when the driver took over"
            self._holder.send(wire.Unprepared(Kind.TEMPLATE, died, ""))

    def close(self) -> None:
        """Let go of the template: it ends its workers, and then itself."""
        if self.template is not None:
            self.template.close()
        self.template = self.loaded = None


def _why_not_started(error: OSError, cwd: str) -> str:
    if not os.path.isdir(cwd):
        return (
            f"the workers' working folder {cwd} isn't there ({error.strerror}): make it, or give another as "
            "RunConfig(worker_runtime_env={'working_dir': …})"
        )
    return f"the template process could not be started: {error}"


def _at_home(message: wire.Prepare) -> wire.Prepare:
    """The same order in terms of this machine: its environment, with what the driver adds to it."""
    mine = [path for path in sys.path if path]
    theirs = [path for path in message.python_path if path not in mine and os.path.exists(path)]
    there = bool(message.cwd) and os.path.isdir(message.cwd)
    return msgspec.structs.replace(
        message,
        env={**os.environ, **message.env},
        python_path=mine + theirs,
        cwd=message.cwd if there else os.getcwd(),
    )
