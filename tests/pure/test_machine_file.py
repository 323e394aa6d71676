"""Machine files: what they say, the place of what is wrong, and the ways between devices."""

from pathlib import Path
from textwrap import dedent

import pytest

from paceline.core.machine import Machine
from paceline.records.machine_file import read_machine
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


@pytest.fixture
def read(tmp_path: Path):
    """Read a machine file of this text."""
    path = tmp_path / "mine.toml"

    def of(text: str) -> Machine:
        path.write_bytes(text.encode(errors="surrogateescape"))
        return read_machine(path)

    return of


def test_a_machine_file_is_read_and_may_say_how_fast_codecs_are(read):
    speed = (
        '{ encode_values_per_s = "1.6 Gvalue/s", decode_values_per_s = 5e9, latency_s = "2 us" }'
    )
    host = f"codecs.cast = {speed}\ncores = 2"
    device = f'codecs.eightbit = {speed}\nkind = "gpu"'
    m = read(GOOD.replace("cores = 2", host).replace('kind = "gpu"', device))
    assert m.links[0].bandwidth_bytes_per_s == 16e9
    (of_device,), (of_host,) = m.devices[0].codecs.values(), m.hosts[0].codecs.values()
    assert (set(m.devices[0].codecs), set(m.hosts[0].codecs)) == ({"eightbit"}, {"cast"})
    assert of_device == of_host
    assert of_device.model_dump() == {
        "encode_values_per_s": 1.6e9,
        "decode_values_per_s": 5e9,
        "latency_s": 2e-6,
    }
    assert Machine.model_validate(m.model_dump()) == m
    assert len({*m.hosts, *m.devices}) == 2  # hosts and devices are keys


@pytest.mark.parametrize("path", sorted(MACHINES.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_machine_of_the_repository_is_valid_and_connected(path: Path):
    known = read_machine(path)
    assert known.name == path.stem
    for device in known.devices[1:]:
        known.route(known.devices[0], device)


def codecs(text: str) -> str:
    return f"[devices.codecs]\n{text}\n[[links]]"


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
        ('"16 GB/s"', '"-16 GB/s"', "links.0.bandwidth_bytes_per_s", ""),
        ('"16 GB/s"', '"1e999 GB/s"', "links.0.bandwidth_bytes_per_s", "1e999"),
        ('"16 GB/s"', '"a lot"', "links.0.bandwidth_bytes_per_s", "'1 Gbit/s'"),
        ('bandwidth_bytes_per_s = "16', '_ = "16', "links.0._", "bandwidth_bytes_per_s"),
        ('bandwidth_bytes_per_s = "16 GB/s"', "", "links.0.bandwidth", '"1 Gbit/s"'),
        ('"16 GB/s"', "-16e9", "links.0.bandwidth_bytes_per_s", ""),
        ('"16 GB/s"', '"16 GB"', "links.0.bandwidth_bytes_per_s", ""),
        ('"1 Tflop/s"', '"1 Tflops"', "devices.0.flops_per_s", ""),
        ('["gpu0", "a"]', '["gpu0", "b"]', "links.gpu0--b.between", "'b'"),
        ('host = "a"', 'host = "c"', "devices.gpu0.host", "['a']"),
        ('kind = "gpu"', 'kind = "tpu"', "devices.0.kind", "'gpu'"),
        ('name = "gpu0"', 'name = "a"', "names must be unique", "['a']"),
        (
            "[[links]]",
            codecs("twobit = { encode_values_per_s = 1 }"),
            "devices.0.codecs.twobit.[key]",
            "'fourbit'",
        ),
        (
            "[[links]]",
            codecs('cast = { encode_values_per_s = "1 GB/s" }'),
            "devices.0.codecs.cast.encode_values_per_s",
            "",
        ),
        (
            "[[links]]",
            codecs("cast = { encode_values_per_s = 1 }"),
            "devices.0.codecs.cast.decode_values_per_s",
            "",
        ),
        ("cores = 2", "cores = ", "not TOML", "line 6"),
        ("[[hosts]]", "[[hosts]", "not TOML", "line 4"),
        ("data sheet", "\\q", "not TOML", ""),
        ("data sheet", "\udcff\udcfe", "not TOML", ""),
    ],
)
def test_what_is_wrong_in_a_machine_file_is_named_by_its_place(
    read, tmp_path, old, new, place, hint
):
    with refused(tmp_path / "mine.toml") as caught:
        read(GOOD.replace(old, new, 1))
    assert caught.value.problem.startswith(place)
    assert hint in caught.value.problem


def test_a_missing_machine_file_is_named(tmp_path: Path):
    with refused(tmp_path / "none.toml"):
        read_machine(tmp_path / "none.toml")


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
    ("more", "missed"),
    [
        (device("gpu1", "a", "gpu"), "gpu1"),
        (HOST.replace('"a"', '"b"'), "b"),
        # Four hosts that were to form a ring: two of its links are not there.
        (hosts_of_cores("bcd") + links_of("ab", "cd"), "c"),
        (hosts_of_cores("bc") + links_of("bc"), "b"),
    ],
)
def test_what_nothing_leads_to_is_a_fault_of_the_file(read, tmp_path, more, missed):
    with refused(tmp_path / "mine.toml") as caught:
        read(GOOD + more)
    assert caught.value.problem.startswith("links: ")
    assert f"{missed!r}" in caught.value.problem


SWITCH = '[[switches]]\nname = "s"\nsource = "-"\n'


@pytest.mark.parametrize(
    "more",
    [
        hosts_of_cores("bcd") + links_of("ab", "bc", "cd"),  # one link short of a cycle
        hosts_of_cores("bc") + links_of("as", "bs", "cs") + SWITCH,
        device("cpu0", "a", "cpu"),
    ],
)
def test_what_is_reached_in_any_way_is_no_fault(read, more):
    known = read(GOOD + more)
    assert all(known.route(known.devices[0], other) for other in known.devices[1:])


@pytest.mark.parametrize(
    "devices",
    # Cores of one host have its memory; one device alone needs no link.
    [device("cpu0", "a", "cpu") + device("cpu1", "a", "cpu"), device("gpu0", "a", "gpu")],
)
def test_cores_of_a_host_or_a_single_device_need_no_link(read, devices):
    assert not read(HEAD + HOST + devices).links
