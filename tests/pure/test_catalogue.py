"""The catalogue of GPUs and links: each entry makes a valid machine."""

import tomllib
from importlib import resources

import pytest

from paceline.records.catalogue import by_name

_FILE = resources.files("paceline.records").joinpath("catalogue.toml")
_CATALOGUE = tomllib.loads(_FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", sorted(_CATALOGUE["devices"]))
def test_gpus_of_each_model_are_connected(model: str) -> None:
    machine = by_name(f"2x{model}")
    assert machine is not None
    assert machine.route(*machine.devices)


@pytest.mark.parametrize("link", sorted(_CATALOGUE["links"]))
def test_each_link_joins_two_hosts(link: str) -> None:
    machine = by_name(f"2x2x{min(_CATALOGUE['devices'])}+{link}")
    assert machine is not None
    assert machine.num_devices == 4
