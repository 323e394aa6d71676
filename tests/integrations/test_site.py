"""The site builds without warnings; pages fit their window and send no request to other hosts."""

import sys
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from processes import Started

ROOT = Path(__file__).parents[2]
WINDOWS = {1280: 900, 390: 844}  # desktop, phone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium or playwright is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    options = ("-f", str(ROOT / "mkdocs.yml"), "--strict", "--site-dir", str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        started = Started([sys.executable, "-m", "mkdocs", "build", *options], ROOT, afresh=True)
        built = started.finish()
        started.close()
    assert built.code == 0, built.err
    return folder


@pytest.mark.parametrize("width", WINDOWS)
def test_pages_fit_their_window_and_send_no_request_to_other_hosts(site: Path, width: int) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs" / "how-to").glob("*.md")))
    wide, asked = [], []
    with Browser() as browser:
        for path in pages:
            page = browser.page(width, WINDOWS[width])
            page.load(path)
            if path.name == "index.html":  # scripts send requests after loading
                page.shown.wait_for_load_state("networkidle")
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append(path.name)
            asked += [address for address in page.addresses if not address.startswith("file:")]
            page.close()
    assert (wide, asked) == ([], [])
