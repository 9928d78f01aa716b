"""A headless chromium, driven over its own pipe: enough to open a page, ask it and photograph it.

`python tests/channel/browser.py URL NAME` writes NAME-light.png and NAME-dark.png.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
WAIT_S = 60.0


class Browser:
    """One page. A context manager."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="rlinf-browser-")
        down, self._down = os.pipe()
        self._up, up = os.pipe()
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self._profile.name}"]
        script = f'exec "$0" "$@" 3<&{down} 4>&{up}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, *command, f"--window-size={width},{height}", "about:blank"],
            pass_fds=(down, up),
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self._numbers, self._read = count(1), b""
        targets = self._ask("Target.getTargets", session="")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attach = {"targetId": page, "flatten": True}
        self._session = self._ask("Target.attachToTarget", attach, session="")["sessionId"]

    def open(self, url: str) -> None:
        """Go there."""
        self._ask("Page.navigate", {"url": url})

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self._ask("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, timeout_s: float = WAIT_S) -> float:
        """Wait until it is true; seconds that took."""
        begun = time.monotonic()
        while not self.evaluate(expression):
            assert time.monotonic() - begun < timeout_s, f"not true in {timeout_s} s: {expression}"
            time.sleep(0.05)  # polls another program
        return time.monotonic() - begun

    def press(self, key: str) -> None:
        """A key of the keyboard, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self._ask("Input.dispatchKeyEvent", event | text)

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self._ask("Emulation.setEmulatedMedia", {"features": [feature]})

    def photograph(self, file: Path) -> None:
        """The whole page as PNG."""
        picture = self._ask("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(picture["data"]))

    def _ask(self, method: str, params: Any = None, session: str | None = None) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params or {}}
        if session is None:
            message["sessionId"] = self._session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        while b"\0" not in self._read:
            data = os.read(self._up, 1 << 16)
            assert data, "chromium has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return message

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._down)
        self._process.terminate()
        self._process.wait(WAIT_S)
        os.close(self._up)
        self._profile.cleanup()


def main(url: str, name: str) -> None:
    """Photograph a page in light and dark."""
    with Browser() as browser:
        browser.open(url)
        browser.until("!!document.querySelector('#gantt rect')")
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            browser.until("document.querySelectorAll('#workers tbody tr').length > 1")
            browser.photograph(Path(f"{name}-{scheme}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
