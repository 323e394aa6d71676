"""Machine files and the catalogue: reading, writing, and the places of faults."""

import tomllib
from importlib import resources
from math import inf
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.core.facts import (
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    Seconds,
    ValuesPerSecond,
    as_rounded,
    quantity,
    rounded,
)
from paceline.core.machine import CodecSpeed, Device, Host, Machine, Switch
from paceline.core.network import Link
from paceline.records.catalogue import by_name
from paceline.records.machine_file import machine_text, read_machine
from refusals import refused

GOOD = dedent(
    """
    name = "pair"

    [[hosts]]
    name = "a"
    cores = 2
    memory_bytes = "8 GiB"
    memory_bandwidth_bytes_per_s = "10 GB/s"
    source = "data sheet"

    [[devices]]
    name = "gpu0"
    host = "a"
    kind = "gpu"
    flops_per_s = "1 Tflop/s"
    memory_bytes = "8 GiB"
    memory_bandwidth_bytes_per_s = "100 GB/s"
    source = "data sheet"

    [[links]]
    between = ["gpu0", "a"]
    bandwidth_bytes_per_s = "16 GB/s"
    latency_s = "10 us"
    source = "data sheet"
    """
)
HEAD, HOST, DEVICE, LINK = (
    GOOD.partition("[[links]]")[0].partition("[[")[0],
    *("[[" + part.strip() + "\n" for part in GOOD.split("[[")[1:]),
)
MACHINES = Path(__file__).parents[2] / "machines"
_FILE = resources.files("paceline.records").joinpath("catalogue.toml")
_CATALOGUE = tomllib.loads(_FILE.read_text(encoding="utf-8"))


@pytest.fixture
def read(tmp_path: Path):
    """Return a function that reads a machine file with a given text."""
    path = tmp_path / "mine.toml"

    def of(text: str) -> Machine:
        path.write_bytes(text.encode(errors="surrogateescape"))
        return read_machine(path)

    return of


@pytest.mark.parametrize("path", sorted(MACHINES.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_machine_of_the_repository_is_valid(path: Path):
    assert read_machine(path).name == path.stem


@pytest.mark.parametrize(
    "name",
    [f"2x{model}" for model in _CATALOGUE["devices"]]
    + [f"2x2x{min(_CATALOGUE['devices'])}+{link}" for link in _CATALOGUE["links"]],
)
def test_every_model_and_link_of_the_catalogue_connects_devices(name: str):
    known = by_name(name)
    machine = known.for_workers(known.num_devices)
    assert machine.route(machine.devices[0], machine.devices[-1])


def codec(name: str, speed: str) -> tuple[str, str]:
    table = f"[devices.codecs]\n{name} = {{ encode_values_per_s = {speed} }}"
    return "[[links]]", f"{table}\n[[links]]"


@pytest.mark.parametrize(
    ("old", "new", "place", "hint"),
    [
        ('host = "a"\n', "", "devices.0.host", 'host = "host0"'),
        ('name = "pair"', "", "name", 'name = "my-machine"'),
        ('["gpu0", "a"]', '["gpu0"]', "links.0.between.1", 'between = ["gpu0", "host0"]'),
        ('["gpu0", "a"]', '"gpu0"', "links.0.between", "between = ["),
        ("cores = 2", "cores = 2\ncorse = 3", "hosts.0.corse", "'cores'"),
        ("cores = 2", "cores = -1", "hosts.0.cores", ""),
        ('name = "pair"', 'name = "pair"\nspeed = 3', "speed", "devices"),
        ('name = "pair"', 'name = "pair"\ngroups = [2, 2]', "groups", "[2, 2]"),
        ('"16 GB/s"', '"1e999 GB/s"', "links.0.bandwidth_bytes_per_s", "1e999"),
        ('"16 GB/s"', '"a lot"', "links.0.bandwidth_bytes_per_s", "'1 Gbit/s'"),
        ('bandwidth_bytes_per_s = "16', '_ = "16', "links.0._", "bandwidth_bytes_per_s"),
        ('bandwidth_bytes_per_s = "16 GB/s"', "", "links.0.bandwidth", '"1 Gbit/s"'),
        ('"16 GB/s"', "-16e9", "links.0.bandwidth_bytes_per_s", ""),
        ('"1 Tflop/s"', '"1 Tflops"', "devices.0.flops_per_s", ""),
        ('["gpu0", "a"]', '["gpu0", "b"]', "links.gpu0--b.between", "'b'"),
        ('host = "a"', 'host = "c"', "devices.gpu0.host", "one of a"),
        ('kind = "gpu"', 'kind = "tpu"', "devices.0.kind", "'gpu'"),
        ('name = "gpu0"', 'name = "a"', "names must be unique", "twice: a"),
        (*codec("twobit", "1"), "devices.0.codecs.twobit.[key]", "'fourbit'"),
        (*codec("cast", '"1 GB/s"'), "devices.0.codecs.cast.encode_values_per_s", ""),
        (*codec("cast", "1"), "devices.0.codecs.cast.decode_values_per_s", ""),
        ("cores = 2", "cores = ", "is not TOML", "line 6"),
        ("[[hosts]]", "[[hosts]", "is not TOML", "line 4"),
        ("data sheet", "\udcff\udcfe", "is not TOML", ""),
    ],
)
def test_a_fault_of_a_machine_file_is_named_by_its_place(read, tmp_path, old, new, place, hint):
    with refused(tmp_path / "mine.toml") as caught:
        read(GOOD.replace(old, new, 1))
    assert caught.value.problem.startswith(place)
    assert hint in caught.value.problem


SWITCH = '[[switches]]\nname = "s"\nsource = "-"\n'


def device(name: str, host: str, kind: str) -> str:
    text = DEVICE.replace('"gpu0"', f'"{name}"').replace('host = "a"', f'host = "{host}"')
    return text.replace('kind = "gpu"', f'kind = "{kind}"')


def hosts_of_cores(names: str) -> str:
    return "".join(
        HOST.replace('"a"', f'"{name}"') + device(f"cpu-{name}", name, "cpu") for name in names
    )


def links_of(*ends: str) -> str:
    return "".join(LINK.replace('["gpu0", "a"]', f'["{one}", "{other}"]') for one, other in ends)


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        (GOOD + device("gpu1", "a", "gpu"), "gpu1"),
        (GOOD + HOST.replace('"a"', '"b"'), "b"),
        # An incomplete ring of four hosts: without two links, or without one.
        (GOOD + hosts_of_cores("bcd") + links_of("ab", "cd"), "c"),
        (GOOD + hosts_of_cores("bcd") + links_of("ab", "bc", "cd"), None),
        (GOOD + hosts_of_cores("bc") + links_of("bc"), "b"),
        (GOOD + hosts_of_cores("bc") + links_of("as", "bs", "cs") + SWITCH, None),
        (GOOD + device("cpu0", "a", "cpu"), None),
        # CPU workers of one host share its memory; a single device needs no link.
        (HEAD + HOST + device("cpu0", "a", "cpu") + device("cpu1", "a", "cpu"), None),
        (HEAD + HOST + device("gpu0", "a", "gpu"), None),
    ],
)
def test_an_unreachable_host_or_device_is_a_fault_of_the_file(read, tmp_path, text, missed):
    if missed is None:
        known = read(text)
        assert not known.links or all(known.route(known.devices[0], d) for d in known.devices[1:])
        return
    with refused(tmp_path / "mine.toml") as caught:
        read(text)
    assert caught.value.problem.startswith("links: ")
    assert f"{missed!r}" in caught.value.problem


POSITIVE = st.floats(min_value=0, max_value=1e30, exclude_min=True)
NOT_NEGATIVE = st.floats(min_value=0, max_value=1e30)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=2000)
NAMES = st.lists(st.text("aZ09_.-", min_size=1, max_size=9), min_size=5, max_size=5, unique=True)
SPEEDS = st.builds(
    CodecSpeed,
    encode_values_per_s=POSITIVE | st.just(inf),
    decode_values_per_s=POSITIVE | st.just(inf),
    latency_s=NOT_NEGATIVE,
)
CODECS = st.dictionaries(st.sampled_from(["eightbit", "fourbit", "cast", "onebit"]), SPEEDS)
FACTS = {"memory_bytes": POSITIVE, "memory_bandwidth_bytes_per_s": POSITIVE, "codecs": CODECS}
UNITS = {
    "B": Bytes,
    "B/s": BytesPerSecond,
    "flop/s": FlopsPerSecond,
    "value/s": ValuesPerSecond,
    "s": Seconds,
}


def machine_of(names: list[str]) -> st.SearchStrategy[Machine]:
    """Return a strategy for machines of a host, three devices and a switch with these names."""
    host, *devices, switch = names

    def part(of: type, **facts) -> st.SearchStrategy:
        known = {
            name: fact if isinstance(fact, st.SearchStrategy) else st.just(fact)
            for name, fact in facts.items()
        }
        return st.builds(of, source=TEXT, **known)

    of_device = {
        "kind": st.sampled_from(["cpu", "gpu"]),
        "flops_per_s": POSITIVE,
        "call_latency_s": NOT_NEGATIVE,
        "sync_latency_s": st.none() | NOT_NEGATIVE,
    }
    links = part(
        Link,
        between=st.tuples(*[st.sampled_from(names)] * 2),
        bandwidth_bytes_per_s=POSITIVE,
        latency_s=NOT_NEGATIVE,
        uses_cores=st.booleans(),
    )
    cores = {"cores": st.integers(1, 2**31), "reduce_latency_s": NOT_NEGATIVE}
    return st.builds(
        Machine,
        name=st.just("-".join(names)),
        hosts=st.tuples(part(Host, name=host, **cores, **FACTS)),
        devices=st.tuples(
            *[part(Device, name=name, host=host, **of_device, **FACTS) for name in devices]
        ),
        links=st.lists(links, max_size=4).map(tuple),
        switches=st.tuples(part(Switch, name=switch)),
        groups=st.sampled_from([(), (1,), (1, 1)]),
    )


@given(NAMES.flatmap(machine_of), st.just("") | TEXT)
def test_a_written_machine_is_read_back_exactly(machine: Machine, comment: str):
    text = machine_text(machine, comment)
    assert text.isascii()
    assert Machine.model_validate(tomllib.loads(text)) == machine


def test_a_written_machine_file_is_readable():
    """Quantities have units, and defaults are left out."""
    text = machine_text(read_machine(MACHINES / "two-core-epyc.toml"), "of Paceline\nitself")
    assert text.startswith('# of Paceline\n# itself\nname = "two-core-epyc"\n\n[[hosts]]\n')
    assert 'memory_bytes = "23.5 GiB"\nmemory_bandwidth_bytes_per_s = "50 GB/s"\n' in text
    assert "\nuses_cores = true\n" in text
    assert "sync_latency_s" not in text
    speeds = 'encode_values_per_s = "1.6 Gvalue/s"\ndecode_values_per_s = "5 Gvalue/s"\n'
    assert f'.codecs.eightbit]\n{speeds}latency_s = "450 us"\n' in text


@pytest.mark.parametrize("unit", UNITS)
@given(value=st.floats(1e-9, 1e18))
def test_quantities_are_exact_and_rounded_ones_within_half_a_percent(unit: str, value: float):
    read = TypeAdapter(UNITS[unit]).validate_python
    text = quantity(value, unit)
    assert text is None or read(text) == value
    assert read(rounded(value, unit)) == as_rounded(value, unit)
    assert as_rounded(value, unit) == pytest.approx(value, rel=0.005000001)
    assert quantity(as_rounded(value, unit), unit) is not None or not 1 <= value < 1e14


@pytest.mark.parametrize(
    ("write", "value", "unit", "text"),
    [
        (rounded, 16 * 2.0**30, "B", "17.2 GB"),
        (rounded, 0.0, "s", "0 ns"),
        (quantity, 16 * 2.0**30, "B", "16 GiB"),
        (quantity, 0.0, "s", None),
        (quantity, inf, "value/s", None),
    ],
)
def test_quantities_are_rounded_or_exact(write, value: float, unit: str, text: str | None):
    assert write(value, unit) == text
