"""A headless Chromium with one page, driven over its DevTools protocol by two pipes."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
REQUIRED = os.environ.get("BROWSER_TESTS") == "required"
"""Whether a machine without it fails the tests: `.ci/run` has installed it."""
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --remote-debugging-pipe"
)
READS, WRITES = 3, 4
"""The descriptors that Chromium reads commands from and writes answers to."""


class Browser:
    """One page of a browser. What it says on its console and what it asks from a network are recorded."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._received = b""
        self._number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **parameters: Any) -> Any:
        """The browser's answer to a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, file: Path) -> None:
        """Show a file, and return when its script has run."""
        self.ask("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, script: str) -> Any:
        """The value of this expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse's button on the first such element."""
        x, y = self.value(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # the page has reacted

    def write(self, selector: str, text: str) -> None:
        """Put this text into a field, as a user's keyboard does."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.ask("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a menu."""
        menu = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{menu}.value = {json.dumps(value)}; {menu}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that keeps what it writes in this folder; it and its children are gone at the end."""
    assert CHROMIUM is not None, "there is no Chromium, and BROWSER_TESTS=required"
    ours, theirs = os.pipe(), os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1]))

    def connect() -> None:
        os.dup2(read, READS)
        os.dup2(write, WRITES)

    process = subprocess.Popen(
        [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=connect,
        start_new_session=True,
        env=os.environ | {"HOME": str(profile)},
    )
    for end in (ours[0], theirs[1], read, write):
        os.close(end)
    try:
        opened = Browser(ours[1], theirs[0])
        (page,) = [one for one in opened.ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = opened.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        opened.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            opened.ask(f"{domain}.enable")
        yield opened
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in (ours[1], theirs[0]):
            os.close(end)
