"""A real browser without a window: Chromium, told what to do over a pipe by the DevTools protocol.

The protocol is JSON with a zero byte after each message, so it takes no library and no port that another process could take.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS_TO_ANSWER = 120


def chromium() -> str | None:
    """Return the path of a Chromium on this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `with Browser() as tab: tab.open(file)`."""

    def __init__(self) -> None:
        path = chromium()
        assert path is not None, "no Chromium: apt-get install chromium"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The protocol's own numbers: it reads from 3 and writes to 4.
        passed = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        command = [path, *flags, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", passed, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        """What went wrong in the pages: exceptions, and what they wrote as an error."""
        self.requests: list[str] = []
        """The addresses that the pages asked for."""

    def __enter__(self) -> Self:
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # it ends when nobody can tell it anything any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the browser's answer; what happens meanwhile is kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS_TO_ANSWER
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._unread += more
        raw, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.errors.append(str([one.get("value", one.get("description")) for one in parameters["args"]]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def open(self, file: Path) -> None:
        """Show a file, and wait until it is loaded."""
        self.call("Page.navigate", url=file.absolute().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression: str) -> Any:
        """Return what a JavaScript expression comes to, once it has; an exception of it is an error here."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until the expression is true."""
        limit = time.monotonic() + _SECONDS_TO_ANSWER
        while not self.evaluate(expression):
            assert time.monotonic() < limit, f"never came true: {expression}"
            time.sleep(0.02)

    def show_as(self, width: int, height: int = 900, *, dark: bool = False, script: bool = True) -> None:
        """Be a window of this size from now on."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)

    def screenshot(self, to: Path) -> None:
        """Write the whole page, as long as it is, to a PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(taken["data"]))
