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
from everstep.protocol import template_words, wire
from everstep.storage.schemes import BUCKETS

_STORAGE_VARIABLES = tuple(scheme.environment for scheme in BUCKETS.values())
"""What the names of the variables begin with that stores take options from."""


class Preparation:
    """The template, and what is known of it. ``heard`` is called with what it says of workers."""

    def __init__(self, folder: Path, holder: Holder, heard: Callable[[template_words.AnyWord], None]) -> None:
        self.template: TemplateProcess | None = None
        self.loaded: template_words.Loaded | None = None
        self._folder = folder
        self._holder = holder
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._looking: wire.Prepare | None = None
        """The order whose storage is being looked at, or was found wanting."""

    def prepare(self, message: wire.Prepare) -> None:
        try:
            message = _at_home(message) if message.elsewhere else message
            self._have_template(self._recipe(message))
        except OSError as error:
            self._holder.say(wire.Unprepared(Kind.START, _why_not_started(error, message.cwd), ""))
            return
        # What we read and write for our workers goes to the same place, with the same rights.
        os.environ.update({k: v for k, v in message.env.items() if k.startswith(_STORAGE_VARIABLES)})
        # Beside the template's imports, which take longer.
        self._looking = message
        threading.Thread(target=self._look_at_storage, args=(message,), daemon=True).start()

    def _recipe(self, message: wire.Prepare) -> Recipe:
        # Where frameworks may keep what they compiled: this machine's, and gone with its last host.
        cache = self._folder.parent / "cache"
        cache.mkdir(mode=0o700, exist_ok=True)
        load = template_words.Load(
            message.code,
            message.config,
            message.python_path,
            message.preload,
            message.probe_s,
            hasattr(os, "pidfd_open"),
            message.script,
        )
        # All that a worker starts inherits the mark, and is found by it if nobody watched when the host died.
        env = {**message.env, "EVERSTEP_CACHE": str(cache), kernel.HOST_MARK: str(self._folder)}
        return Recipe(load, env, message.cwd)

    def _have_template(self, recipe: Recipe) -> None:
        if self.template is None or self.template.recipe != recipe:
            self.close()
            self.template = TemplateProcess(recipe, self._template_said)

    def template_for_worker(self) -> TemplateProcess:
        """The one that forks; or, where that isn't safe, a process that becomes the worker itself."""
        assert self.template is not None, "workers start on prepared hosts only"
        assert self.loaded is not None, "workers start on prepared hosts only"
        if self.loaded.forks:
            return self.template
        recipe = self.template.recipe
        load = msgspec.structs.replace(recipe.load, may_fork=False)
        return TemplateProcess(Recipe(load, recipe.env, recipe.cwd), self._template_said)

    def _template_said(self, template: TemplateProcess, word: template_words.AnyWord) -> None:
        match word:
            case template_words.Loaded():
                if template is self.template:
                    self.loaded = word
                    self._check_prepared()
            case template_words.LoadFailed():
                self._holder.say(wire.Unprepared(Kind.LOAD, word.message, word.traceback))
            case _:
                self._heard(word)

    def _look_at_storage(self, message: wire.Prepare) -> None:
        from everstep.errors import StorageAccessError, StorageError
        from everstep.storage.shared import look_for_marker
        from everstep.storage.store import open_store

        refusal: wire.Unprepared | None = None
        try:
            run = open_store(message.run_folder, message.storage_options, message.storage_limits)
            look_for_marker(run, message.marker)
        except (StorageError, OSError) as error:
            kind = Kind.STORAGE if isinstance(error, StorageAccessError) else Kind.START
            refusal = wire.Unprepared(kind, str(error), "")
        self._loop.call_soon_threadsafe(self._looked, message, refusal)

    def _looked(self, message: wire.Prepare, refusal: wire.Unprepared | None) -> None:
        if message is not self._looking:
            return  # asked again meanwhile
        if refusal is not None:
            self._holder.say(refusal)
            return
        self._looking = None
        self._check_prepared()

    def _check_prepared(self) -> None:
        if self.loaded is not None and self._looking is None:
            self._holder.say(wire.Prepared(self.loaded.forks, self.loaded.why_not, self.loaded.seconds))

    def template_died(self, status: int) -> TemplateProcess:
        """The kernel says so. Gives what is left of it."""
        assert self.template is not None
        template, self.template, self.loaded = self.template, None, None
        template.drain()
        template.close()
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        self._holder.say(wire.Unprepared(Kind.TEMPLATE, f"the template process died ({how})", ""))
        return template

    def tell_again(self) -> None:
        """A later driver must not count on a template that died while nobody listened."""
        if self.loaded is None:
            died = "its template process had died, or was not ready, when the driver took over"
            self._holder.say(wire.Unprepared(Kind.TEMPLATE, died, ""))

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
