from pathlib import Path
from textwrap import dedent

import pytest

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.records.machine_file import read_machine

GOOD = """
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


def test_a_machine_file_is_read(tmp_path: Path):
    path = tmp_path / "pair.toml"
    path.write_text(dedent(GOOD))
    assert read_machine(path).links[0].bandwidth_bytes_per_s == 16e9


def test_a_machine_file_may_say_how_fast_codecs_are(tmp_path: Path):
    path = tmp_path / "pair.toml"
    speed = (
        '{ encode_values_per_s = "1.6 Gvalue/s", decode_values_per_s = 5e9, latency_s = "2 us" }'
    )
    host = f"codecs.cast = {speed}\ncores = 2"
    device = f'codecs.eightbit = {speed}\nkind = "gpu"'
    text = dedent(GOOD).replace("cores = 2", host).replace('kind = "gpu"', device)
    path.write_text(text)
    m = read_machine(path)
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


FILES = sorted(Path("machines").rglob("*.toml"))  # those of equal devices, too


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_machine_files_can_be_read(path: Path):
    assert read_machine(path).name == path.stem


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('host = "a"\n', "", 'devices.0.host: Field required; for example host = "host0"'),
        (
            '"16 GB/s"',
            '"-16 GB/s"',
            "links.0.bandwidth_bytes_per_s: Input should be greater than 0, not '-16 GB/s'",
        ),
        ('"16 GB/s"', '"1e999 GB/s"', "links.0.bandwidth_bytes_per_s: '1e999' is too large"),
        ('"16 GB/s"', '"a lot"', "'a lot' is not a quantity; write for example '1 Gbit/s'"),
        ('bandwidth_bytes_per_s = "16 GB/s"', "", 'for example bandwidth_bytes_per_s = "1 Gbit/s"'),
        ('["gpu0", "a"]', '["gpu0"]', 'Field required; for example between = ["gpu0", "host0"]'),
        ('["gpu0", "a"]', '"gpu0"', "not 'gpu0'; for example between = ["),
        ('name = "pair"', "", 'name: Field required; for example name = "my-machine"'),
        ('"16 GB/s"', "-16e9", "links.0.bandwidth_bytes_per_s: Input should be greater than 0"),
        ('"16 GB/s"', '"16 GB"', "links.0.bandwidth_bytes_per_s: unknown unit 'GB' in '16 GB'"),
        ('["gpu0", "a"]', '["gpu0", "b"]', "links.gpu0--b.between: nothing is called 'b'"),
        ('host = "a"', 'host = "c"', "devices.gpu0.host: no host 'c'; known: ['a']"),
        ('kind = "gpu"', 'kind = "tpu"', "devices.0.kind: Input should be 'cpu' or 'gpu'"),
        ('name = "gpu0"', 'name = "a"', "names must be unique, but ['a'] stand twice"),
        (
            "cores = 2",
            "cores = 2\ncorse = 3",
            "hosts.0.corse: Extra inputs are not permitted, not 3; did you mean 'cores'? ",
        ),
        (
            "[[links]]",
            "[devices.codecs]\ntwobit = { encode_values_per_s = 1 }\n[[links]]",
            "devices.0.codecs.twobit.[key]: Input should be 'eightbit', 'fourbit', 'cast', "
            "'onebit' or 'threshold'",
        ),
        (
            "[[links]]",
            '[devices.codecs]\ncast = { encode_values_per_s = "1 GB/s" }\n[[links]]',
            "devices.0.codecs.cast.encode_values_per_s: unknown unit 'GB/s' in '1 GB/s'",
        ),
        (
            "[[links]]",
            "[devices.codecs]\ncast = { encode_values_per_s = 1 }\n[[links]]",
            "devices.0.codecs.cast.decode_values_per_s: Field required",
        ),
        ("cores = 2", "cores = ", "not TOML: Invalid value (at line 6, column 9)"),
    ],
)
def test_a_bad_machine_file_is_named_with_its_field(tmp_path: Path, old, new, message):
    path = tmp_path / "bad.toml"
    path.write_text(dedent(GOOD).replace(old, new, 1))
    with pytest.raises(InvalidInput) as caught:
        read_machine(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


PARTS = """
    [[devices]]
    name = "{name}"
    host = "{host}"
    kind = "{kind}"
    flops_per_s = "1 Tflop/s"
    memory_bytes = "8 GiB"
    memory_bandwidth_bytes_per_s = "100 GB/s"
    source = "data sheet"
"""
ANOTHER_HOST = """
    [[hosts]]
    name = "{name}"
    cores = 2
    memory_bytes = "8 GiB"
    memory_bandwidth_bytes_per_s = "10 GB/s"
    source = "data sheet"
"""
ANOTHER_LINK = """
    [[links]]
    between = ["{one}", "{other}"]
    bandwidth_bytes_per_s = "1 Gbit/s"
    latency_s = "10 us"
    source = "data sheet"
"""


def hosts_of_cores(names: str) -> str:
    return "".join(
        ANOTHER_HOST.format(name=name) + PARTS.format(name=f"cpu-{name}", host=name, kind="cpu")
        for name in names
    )


def links_of(*ends: str) -> str:
    return "".join(ANOTHER_LINK.format(one=one, other=other) for one, other in ends)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (PARTS.format(name="gpu1", host="a", kind="gpu"), "no link leads to device 'gpu1' from"),
        (ANOTHER_HOST.format(name="b"), 'between = ["a", "b"] would join them'),
        # Four hosts that were to form a ring: two of its links are not there.
        (hosts_of_cores("bcd") + links_of("ab", "cd"), "no way over links leads to host 'c' from"),
        (hosts_of_cores("bc") + links_of("bc"), "no way over links leads to host 'b' from 'gpu0'"),
    ],
)
def test_what_nothing_leads_to_is_a_fault_of_the_file(tmp_path: Path, more, message):
    path = tmp_path / "apart.toml"
    path.write_text(dedent(GOOD) + dedent(more))
    with pytest.raises(InvalidInput) as caught:
        read_machine(path)
    assert str(caught.value).startswith(f"{path}: links: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_reached_in_any_way_is_no_fault(tmp_path: Path):
    path = tmp_path / "joined.toml"
    switch = '[[switches]]\nname = "s"\nsource = "-"\n'
    ring = hosts_of_cores("bcd") + links_of("ab", "bc", "cd")  # one link short of a cycle
    star = hosts_of_cores("bc") + links_of("as", "bs", "cs") + switch
    for more in (ring, star, PARTS.format(name="cpu0", host="a", kind="cpu")):
        path.write_text(dedent(GOOD) + dedent(more))
        known = read_machine(path)
        assert all(known.route(known.devices[0], other) for other in known.devices[1:])
    # Cores of one host have its memory; one device alone needs no link.
    cores = [PARTS.format(name=f"cpu{i}", host="a", kind="cpu") for i in range(2)]
    head = dedent(GOOD)[: dedent(GOOD).index("[[devices]]")]
    for devices in ("".join(cores), PARTS.format(name="gpu0", host="a", kind="gpu")):
        path.write_text(head + dedent(devices))
        assert not read_machine(path).links


def test_a_missing_machine_file_is_named(tmp_path: Path):
    with pytest.raises(InvalidInput, match=r"none.toml: cannot be read: No such file"):
        read_machine(tmp_path / "none.toml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_machine_of_the_repository_is_valid_and_connected(path: Path):
    known = read_machine(path)
    for device in known.devices[1:]:
        known.route(known.devices[0], device)
