"""Chromium without a window, by its DevTools protocol over a pipe: for benchmarks, tests and pictures of
the page. No port is opened, and nothing but Chromium is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S = 600.0
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # a container's root has no other way
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--window-size=1280,1000",
)


# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCH = """
import fcntl, os, sys
given = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(given[0], 3)
os.dup2(given[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class PageError(Exception):
    """A page threw, or Chromium refused something."""


class Browser:
    """One Chromium. ``close`` ends it and all that it started."""

    def __init__(self) -> None:
        program = find_chromium()
        assert program is not None, f"none of {', '.join(NAMES)} is on the PATH"
        self._folder = tempfile.mkdtemp(prefix="evchrome")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != "EVERSTEP_TEST_SESSION"}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(commands), str(answers)),
                *(program, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"),
            ],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**environment, "HOME": self._folder},
        )
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._read = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        os.close(self._commands)
        os.close(self._answers)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        # Its children may still be writing there for a moment.
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self.receive()
            if answer.get("id") != number:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise PageError(f"{method}: {answer['error']}")
            return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has said nothing for {LIMIT_S:g} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def open(self, address: str, **options: Any) -> Page:
        page = Page(self, **options)
        page.go(address)
        return page


class Page:
    """A tab."""

    def __init__(
        self, browser: Browser, *, dark: bool = False, width: int = 1280, height: int = 1000
    ) -> None:
        self._browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.size(width, height)

    def size(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self.session, **params)

    def go(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """What an expression comes to; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (found := self.run(condition)):
            assert time.monotonic() < deadline, f"not seen within {LIMIT_S:g} s: {condition}"
            time.sleep(0.05)
        return found

    def frame(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        codes |= {"ArrowDown": 40, "End": 35, "Home": 36}
        given = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0])), "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **given, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def errors(self) -> list[str]:
        """What the page complained of so far: exceptions, refused scripts, failed requests."""
        self.run("0")  # what was said before this has been read by now
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self.session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that it has asked for."""
        self.run("0")
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self.session and event["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, file: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)
