"""README and pages: sentences, the field's words, figures, links, and the drawing of layers."""

import re
import runpy
import tomllib
from pathlib import Path
from urllib.parse import urldefrag

import pytest

ROOT = Path(__file__).parents[2]
# Pages of generated tables, whose cells may have many figures.
TABLES = {"reference.md", "reference-files.md", "results.md"}
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("docs/**/*.md"))
        if path.name not in TABLES
    ),
)
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MOST_WORDS = 30
# Metaphors that were once names of parts of this project, and that a reader cannot guess.
METAPHORS = frozenset(
    re.findall(
        r"\w+",
        "desk desks door doors line lines ledger terms bearing bearings wake crew hand hands roll "
        "rolls tally conduct keeper way ways trunk look looks say says strike passed lose loses",
    )
)


def prose(text: str) -> str:
    """Return the text without code blocks, inline code and link targets."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"^#+ (.*)$", r"\n\1\n", text, flags=re.M)
    return re.sub(r"[*_]{2}", "", text)


def sentences(text: str) -> list[str]:
    """Split into sentences; a heading, a list item or a table cell also counts as one."""
    parts = []
    for block in re.split(r"\n\s*\n|\n(?=[-|#] ?)|\|", prose(text)):
        parts += re.split(r"(?<=[.!?])\s+", " ".join(block.split()))
    return [part for part in parts if re.search(r"\w", part)]


def words(sentence: str) -> list[str]:
    return re.findall(r"[\w'.,:-]*\w", sentence)


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short_and_free_of_metaphors(page):
    text = (ROOT / page).read_text()
    assert not [one for one in sentences(text) if len(words(one)) > MOST_WORDS]
    assert not METAPHORS & set(re.findall(r"[a-z]+", prose(text).lower()))


def test_each_figure_of_the_readme_is_in_the_results_with_the_same_command():
    table = README.partition("## Five figures")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 5
    for row in rows:
        _, _, figure, part, _ = row.split("|")
        command = f"`python benchmarks/run.py {part.strip(' `')}`"
        (result,) = [line for line in RESULTS.splitlines() if line.count(command) == 1]
        numbers = re.findall(r"\d+(?:\.\d+)?", figure)
        assert numbers
        assert set(numbers) <= set(re.findall(r"\d+(?:\.\d+)?", result)), command


def test_links_of_the_readme_are_absolute_and_linked_files_exist():
    home = re.escape(SETTINGS["project"]["urls"]["Repository"])
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            ours = re.fullmatch(rf"{home}/(?:blob|tree|raw)/main/(.+)", link)
            if page.name == "README.md":
                assert ours, link
                assert (ROOT / ours[1]).exists(), link
            elif "://" not in link:
                assert (page.parent / urldefrag(link).url).exists(), (page, link)


@pytest.mark.parametrize(
    ("script", "page"),
    [("reference.py", "reference.md"), ("reference_files.py", "reference-files.md")],
)
def test_the_reference_is_up_to_date(script, page):
    made = runpy.run_path(str(ROOT / "docs" / "build" / script))["page"]()
    assert (ROOT / "docs" / page).read_text() == made, f"python docs/build/{script}"


def test_the_results_cover_every_benchmark_and_name_existing_commands():
    measured = {file.parent.name for file in (ROOT / "benchmarks").glob("*/result.json")}
    shown = set(re.findall(r"benchmarks/run\.py (\w+)", RESULTS))
    assert measured <= shown
    for folder in shown:
        assert (ROOT / "benchmarks" / folder / "main.py").is_file()
        assert (ROOT / "benchmarks" / folder / "result.json").is_file()


FLOOR = re.compile(r"^ ?(\d+)  ([a-z]+(?:, [a-z]+)*)  +\S", re.MULTILINE)


def test_the_drawing_of_the_architecture_has_the_layers_of_the_import_contract():
    drawing = (ROOT / "docs" / "architecture.md").read_text().partition("## The house")[2]
    floors = FLOOR.findall(drawing.partition("## ")[0])
    layers = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [set(re.split(r"[ |:]+", layer)) - {"cli", "__main__"} for layer in layers]
    assert [set(names.split(", ")) for _, names in floors] == rooms
    assert [int(number) for number, _ in floors] == list(range(len(rooms), 0, -1))
    assert len(floors) <= 12
    folders = {path.parent.name for path in (ROOT / "src" / "paceline").glob("*/__init__.py")}
    assert set().union(*rooms) == folders
