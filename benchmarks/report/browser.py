"""Chromium without a window, asked over a pipe: what a page shows, says and asks for.

It speaks the DevTools protocol, one JSON object after another, each ended by a zero byte. No port
is opened, nothing is looked up in a network, and all that it writes is in one folder.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any, NamedTuple, Self

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-breakpad"),
    *("--disable-crash-reporter", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank"),
)
_ABOVE = 10  # of the numbers 3 and 4, which Chromium takes for the two ends


class Opened(NamedTuple):
    """How long a page took, in seconds since it was asked for."""

    first_screen_s: float
    """Until the first window was filled and painted, its figures drawn."""
    all_figures_s: float


class Silent(TimeoutError):
    """Chromium has not answered in time."""


class Browser:
    """A Chromium of its own, whose processes all end with it; `folder` keeps what it writes."""

    def __init__(self, folder: Path, deadline_s: float = 60.0) -> None:
        assert CHROMIUM is not None, "chromium is not installed"
        self._deadline_s, self._number, self._rest = deadline_s, 0, b""
        self.events: list[dict[str, Any]] = []
        theirs_in, self._in = _pipe()
        self._out, theirs_out = _pipe()
        redirected = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            # Other shells know no numbers above 9 here.
            ["/bin/bash", "-c", redirected, "bash", CHROMIUM, f"--user-data-dir={folder}", *_FLAGS],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            with suppress(OSError, subprocess.TimeoutExpired):
                self.call("Browser.close")
                self._process.wait(self._deadline_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    @property
    def group(self) -> int:
        """The process group of all its processes."""
        return self._process.pid

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask for something and return the answer. RuntimeError if it is refused."""
        self._number += 1
        number = self._number
        asked = {"id": number, "method": method, "params": params}
        asked |= {"sessionId": session} if session else {}
        os.write(self._in, json.dumps(asked).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == number, method)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def event(self, method: str, session: str) -> dict[str, Any]:
        """Return the first event of this kind that has come or comes."""

        def wanted(message: dict[str, Any]) -> bool:
            return message.get("method") == method and message.get("sessionId") == session

        known = next((message for message in self.events if wanted(message)), None)
        return known if known is not None else self._until(wanted, method)

    def _until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        ends = time.monotonic() + self._deadline_s
        while True:
            message = self._message(ends, what)
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message

    def _message(self, ends: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = max(0.0, ends - time.monotonic())
            if not select.select([self._out], [], [], left)[0]:
                raise Silent(f"{what}: no answer within {self._deadline_s:g} s")
            more = os.read(self._out, 1 << 20)
            if not more:
                raise BrokenPipeError(f"{what}: chromium has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def page(self, width: int, height: int, *, dark: bool = False, media: str = "") -> "Page":
        """Return an empty page of this size in CSS pixels; narrow ones are those of a phone."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        page.look(dark=dark, media=media)
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return page


class Page:
    """One tab, and what has been said in it since it was made."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask this tab for something."""
        return self._browser.call(method, self._session, **params)

    def look(self, *, dark: bool = False, media: str = "") -> None:
        """Prefer dark colours, or light ones; `media` may be "print"."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def load(self, path: Path) -> None:
        """Open a file, once, and wait until it is loaded, whatever figures are drawn by then."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._browser.event("Page.loadEventFired", self._session)

    def open(self, path: Path) -> Opened:
        """Open a file, once, and wait until it is loaded and all its figures are drawn."""
        self.load(path)
        filled, every, painted = self.evaluate(_OPENED)
        return Opened(max(filled, painted) / 1000, every / 1000)

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript, that of a promise once it is there."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that nothing caught."""
        own = [one for one in self._browser.events if one.get("sessionId") == self._session]
        found = []
        for one in own:
            params = one["params"]
            if one["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif one["method"] == "Log.entryAdded" and params["entry"]["level"] != "verbose":
                found.append(params["entry"]["text"])
            elif params.get("type") in ("error", "warning", "assert"):
                found.append(json.dumps(params["args"]))
        return found

    @property
    def addresses(self) -> list[str]:
        """Whatever the page has asked for, itself included."""
        return [
            one["params"]["request"]["url"]
            for one in self._browser.events
            if one.get("sessionId") == self._session
            and one["method"] == "Network.requestWillBeSent"
        ]

    def click(self, x: float, y: float, count: int = 1) -> None:
        """Press and let go of the mouse at a place on the screen."""
        for number in range(1, count + 1):
            for what in ("mousePressed", "mouseReleased"):
                self._mouse(what, x, y, number)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at one place on the screen, and let go of it at another."""
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        self._mouse("mousePressed", *start)
        self._mouse("mouseMoved", *middle)
        self._mouse("mouseMoved", *end)
        self._mouse("mouseReleased", *end)

    def _mouse(self, what: str, x: float, y: float, count: int = 1) -> None:
        self.call(
            "Input.dispatchMouseEvent",
            type=what,
            x=x,
            y=y,
            button="left",
            buttons=0 if what == "mouseReleased" else 1,
            clickCount=count,
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page, or only of its first screen, as PNG."""
        size = self.call("Page.getLayoutMetrics")[
            "cssContentSize" if whole else "cssLayoutViewport"
        ]
        width = size.get("width", size.get("clientWidth"))
        height = size.get("height", size.get("clientHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self, path: Path) -> None:
        """Write the page as it is printed."""
        printed = self.call("Page.printToPDF", preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(printed["data"]))

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)


# Two promises of milliseconds since the page was asked for: each is looked at in every frame, and
# kept in the task after that.
_WATCH = """
(() => {
  const when = (shown) => new Promise((resolve) => {
    const look = () => {
      if (shown()) setTimeout(() => resolve(performance.now()));
      else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  });
  const drawn = (figure) => figure.querySelector(".main-svg");
  const figures = () => [...document.querySelectorAll("figure")];
  const read = () => document.readyState !== "loading";
  const inWindow = (figure) => figure.getBoundingClientRect().top < innerHeight;
  const filled = () => document.body && document.body.getBoundingClientRect().bottom >= innerHeight;
  globalThis.firstScreen = when(
    () => (read() || filled()) && figures().filter(inWindow).every(drawn)
  );
  globalThis.allFigures = when(() => read() && figures().every(drawn));
})()
"""
_OPENED = """
Promise.all([firstScreen, allFigures]).then((both) => [
  ...both, performance.getEntriesByName("first-contentful-paint")[0].startTime
])
"""


def _pipe() -> tuple[int, int]:
    """Return the ends to read from and to write to, neither of which has a low number."""
    ends = []
    for low in os.pipe():
        ends.append(fcntl(low, F_DUPFD_CLOEXEC, _ABOVE))
        os.close(low)
    return ends[0], ends[1]
