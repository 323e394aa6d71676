"""Chromium without a window, by Playwright: what a page shows, says and asks for."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

# Of the system; Playwright would download its own.
CHROMIUM = shutil.which("chromium") if find_spec("playwright") else None


class Opened(NamedTuple):
    """How long a page took, in seconds since it was asked for."""

    first_screen_s: float
    """Until the first window was filled and painted, its figures drawn."""
    all_figures_s: float


class Browser:
    """A Chromium of its own, whose processes all end with it."""

    def __enter__(self) -> Self:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._browser.close()
        self._playwright.stop()

    def page(self, width: int, height: int, *, dark: bool = False) -> "Page":
        """Return an empty page of this size in CSS pixels; narrow ones are those of a phone."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            is_mobile=width < 700,
            color_scheme="dark" if dark else "light",
            permissions=["clipboard-read", "clipboard-write"],
        )
        return Page(context)


class Page:
    """A tab: `shown` is Playwright's, and the rest what has been said in it since it was made."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.complaints: list[str] = []
        self.addresses: list[str] = []
        context.add_init_script(_WATCH)
        self.shown = context.new_page()
        self.shown.on("request", lambda request: self.addresses.append(request.url))
        self.shown.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.shown.on("console", self._hear)
        self.evaluate = self.shown.evaluate

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def load(self, path: Path) -> None:
        """Open a file, once, and wait until it is loaded, whatever figures are drawn by then."""
        self.shown.goto(path.resolve().as_uri())

    def open(self, path: Path) -> Opened:
        """Open a file, once, and wait until it is loaded and all its figures are drawn."""
        self.load(path)
        filled, every, painted = self.evaluate(_OPENED)
        return Opened(max(filled, painted) / 1000, every / 1000)

    def close(self) -> None:
        """Close the tab."""
        self._context.close()


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
