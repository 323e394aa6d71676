"""Machines that are written down are read back as they were."""

import tomllib
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.core.facts import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, ValuesPerSecond
from paceline.core.machine import CodecSpeed, Device, Host, Machine, Switch
from paceline.core.network import Link
from paceline.records.machine_file import as_rounded, machine_text, quantity, read_machine, rounded

MACHINES = Path(__file__).parents[2] / "machines"
POSITIVE = st.floats(min_value=0, max_value=1e30, exclude_min=True)
NOT_NEGATIVE = st.floats(min_value=0, max_value=1e30)
SOURCES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=2000)
SPEEDS = st.builds(
    CodecSpeed,
    encode_values_per_s=POSITIVE | st.just(inf),
    decode_values_per_s=POSITIVE | st.just(inf),
    latency_s=NOT_NEGATIVE,
)
CODECS = st.dictionaries(st.sampled_from(["eightbit", "fourbit", "cast", "onebit"]), SPEEDS)
UNITS = {
    "B": Bytes,
    "B/s": BytesPerSecond,
    "flop/s": FlopsPerSecond,
    "value/s": ValuesPerSecond,
    "s": Seconds,
}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    names = draw(
        st.lists(st.text("aZ09_.-", min_size=1, max_size=9), min_size=3, max_size=7, unique=True)
    )
    host, device, switch, *others = names
    hosts = st.builds(
        Host,
        name=st.just(host),
        cores=st.integers(1, 2**31),
        memory_bytes=POSITIVE,
        memory_bandwidth_bytes_per_s=POSITIVE,
        reduce_latency_s=NOT_NEGATIVE,
        codecs=CODECS,
        source=SOURCES,
    )

    def devices(name: str) -> st.SearchStrategy[Device]:
        return st.builds(
            Device,
            name=st.just(name),
            host=st.just(host),
            kind=st.sampled_from(["cpu", "gpu"]),
            flops_per_s=POSITIVE,
            memory_bytes=POSITIVE,
            memory_bandwidth_bytes_per_s=POSITIVE,
            call_latency_s=NOT_NEGATIVE,
            sync_latency_s=st.none() | NOT_NEGATIVE,
            codecs=CODECS,
            source=SOURCES,
        )

    has_switch = draw(st.booleans())
    ends = st.sampled_from(names if has_switch else [host, device, *others])
    links = st.builds(
        Link,
        between=st.tuples(ends, ends),
        bandwidth_bytes_per_s=POSITIVE,
        latency_s=NOT_NEGATIVE,
        uses_cores=st.booleans(),
        source=SOURCES,
    )
    return Machine(
        name=draw(st.text("aZ09_.-", min_size=1, max_size=100)),
        hosts=(draw(hosts),),
        devices=tuple(draw(devices(name)) for name in (device, *others)),
        links=tuple(draw(st.lists(links, max_size=4))),
        switches=(Switch(name=switch, source=draw(SOURCES)),) if has_switch else (),
        groups=(1,) * draw(st.integers(0, 2)),
    )


@given(machines(), st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_written_is_read_back_exactly(machine: Machine, comment: str):
    text = machine_text(machine, comment)
    assert text.isascii()
    assert Machine.model_validate(tomllib.loads(text)) == machine


def test_a_machine_file_is_written_as_people_write_it(tmp_path: Path):
    for path in (MACHINES / "two-core-epyc.toml", MACHINES / "power8-p100.toml"):
        machine, copy = read_machine(path), tmp_path / "copy.toml"
        copy.write_text(machine_text(machine, "of Paceline\nitself"))
        assert read_machine(copy) == machine
        head = f'# of Paceline\n# itself\nname = "{path.stem}"\n\n[[hosts]]\n'
        assert copy.read_text().startswith(head)


def test_quantities_keep_their_units_and_defaults_are_left_out():
    machine = read_machine(MACHINES / "two-core-epyc.toml")
    lines = machine_text(machine).splitlines()
    assert 'memory_bytes = "23.5 GiB"' in lines
    assert 'memory_bandwidth_bytes_per_s = "50 GB/s"' in lines
    assert 'call_latency_s = "3 us"' in lines
    assert "uses_cores = true" in lines
    assert not any(line.startswith("sync_latency_s") for line in lines)
    assert (
        'codecs.eightbit = { encode_values_per_s = "1.6 Gvalue/s", '
        'decode_values_per_s = "5 Gvalue/s", latency_s = "450 us" }'
    ) in lines


@pytest.mark.parametrize("unit", UNITS)
@given(value=st.floats(1e-9, 1e18))
def test_a_quantity_means_the_value_and_a_rounded_one_nearly(unit: str, value: float):
    read = TypeAdapter(UNITS[unit]).validate_python
    text = quantity(value, unit)
    assert text is None or read(text) == value
    assert read(rounded(value, unit)) == as_rounded(value, unit)
    assert as_rounded(value, unit) == pytest.approx(value, rel=0.005000001)
    assert quantity(as_rounded(value, unit), unit) is not None or not 1 <= value < 1e14


@pytest.mark.parametrize(
    ("write", "value", "unit", "text"),
    [
        (rounded, 1.6e9, "B/s", "1.6 GB/s"),
        (rounded, 999.9e6, "B/s", "1000 MB/s"),
        (rounded, 103e9, "flop/s", "103 Gflop/s"),
        (rounded, 16 * 2.0**30, "B", "17.2 GB"),
        (rounded, 450e-6, "s", "450 us"),
        (rounded, 1.5, "s", "1.5 s"),
        (rounded, 0.0, "s", "0 ns"),
        (quantity, 16 * 2.0**30, "B", "16 GiB"),
        (quantity, 16e9, "B", "16 GB"),
        (quantity, 512.0, "B", "512 B"),
        (quantity, 0.0, "s", None),
        (quantity, inf, "value/s", None),
        (quantity, 1e-12, "s", None),
    ],
)
def test_quantities_are_rounded_or_exact(write, value: float, unit: str, text: str | None):
    assert write(value, unit) == text
