"""Open pages in headless Chromium by Playwright; record messages and requests."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

# The system's Chromium, because Playwright would download another one.
CHROMIUM = shutil.which("chromium") if find_spec("playwright") else None


class Browser:
    """A context manager that starts Chromium and ends all of its processes."""

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
        """Return an empty page of this size in CSS pixels; narrow pages emulate phones."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            is_mobile=width < 700,
            color_scheme="dark" if dark else "light",
            permissions=["clipboard-read", "clipboard-write"],
        )
        return Page(context)


class Page:
    """A tab: `shown` is Playwright's page; `complaints` and `addresses` collect its history."""

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
        """Open a file and wait until it is loaded, without its figures; call once."""
        self.shown.goto(path.resolve().as_uri())

    def open(self, path: Path) -> None:
        """Open a file, and wait until the first window is filled and all figures drawn."""
        self.load(path)
        self.evaluate("Promise.all([firstScreen, allFigures])")

    def close(self) -> None:
        """Close the tab."""
        self._context.close()


# Two promises. Each checks its condition in every frame, and resolves in the next task.
_WATCH = """
(() => {
  const when = (shown) => new Promise((resolve) => {
    const look = () => {
      if (shown()) setTimeout(resolve);
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
