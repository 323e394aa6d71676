"""A hook of mkdocs: links to files beside docs/ lead to the repository."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s#]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with absolute links in place of those that leave the folder of the site."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def absolute(match: re.Match[str]) -> str:
        path = _normal(folder / match[1])
        if path.parts[0] == "docs" and path.suffix in (".md", ".png", ".svg"):
            return match[0]
        assert (ROOT / path).exists(), f"{page.file.src_uri}: {match[1]}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}"

    return _LINK.sub(absolute, markdown)


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return PurePosixPath(*parts)


def on_post_page(output: str, **_: Any) -> str:
    """Return the page without the number of stars, which browsers would ask GitHub for."""
    return output.replace(' data-md-component="source"', "")
