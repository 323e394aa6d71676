"""The drawing of layers in docs/architecture.md matches the import contract."""

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FLOOR = re.compile(r"^ ?(\d+)  ([a-z]+(?:, [a-z]+)*)  +\S", re.MULTILINE)
_OUTSIDE = {"cli", "__main__"}


def test_the_drawing_has_the_layers_of_the_contract() -> None:
    drawing = (_ROOT / "docs" / "architecture.md").read_text().partition("## The house")[2]
    floors = _FLOOR.findall(drawing.partition("## ")[0])
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    rooms = [set(re.split(r"[ |:]+", layer)) - _OUTSIDE for layer in layers]
    assert [set(names.split(", ")) for _, names in floors] == rooms
    assert [int(number) for number, _ in floors] == list(range(len(rooms), 0, -1))
    assert len(floors) <= 12
    folders = {path.parent.name for path in (_ROOT / "src" / "paceline").glob("*/__init__.py")}
    assert set().union(*rooms) == folders
