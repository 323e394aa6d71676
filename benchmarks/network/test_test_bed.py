"""Two hosts on this machine: places, namespaces, rates, counters, and the program's line."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from host import NoTestBed
from hosts import Traffic, TwoHosts
from wire import bits_per_s, seconds

from processes import Started
from refusals import refused

BED = Path(__file__).parent
PROBE = [sys.executable, str(BED / "probe.py")]
PROGRAMS = Path(__file__).parent / "programs"
NBYTES = 5_000_000


def settled(hosts: TwoHosts) -> tuple[Traffic, Traffic]:
    """Return the counters, once all that was sent has arrived."""
    while True:
        one, other = hosts.nbytes()
        if (one.sent, one.received) == (other.received, other.sent):
            return one, other


def sent_again(hosts: TwoHosts) -> int:
    """Return how many segments the first host's TCP has sent more than once, by its kernel."""
    names, values = (
        line.split() for line in hosts.run(["grep", "^Tcp:", "/proc/net/snmp"])[0].out.splitlines()
    )
    return int(values[names.index("RetransSegs")])


def test_ranks_of_two_hosts_know_their_places_and_share_no_namespace(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    last = max(os.sched_getaffinity(0))
    about = [sys.executable, str(PROGRAMS / "about.py")]
    finished = hosts.run(about, 2, {"OWN": "yes"}, cores=(last, last), cwd=tmp_path)
    assert [one.code for one in finished] == [0, 0], finished
    rows = [[json.loads(line) for line in one.out.splitlines()] for one in finished]
    ranks = sorted(row["variables"] for host_rows in rows for row in host_rows)
    assert ranks == [[str(n), "4", str(n % 2), "2", "wire", "yes"] for n in range(4)]
    for key in ("network", "processes"):
        names = [{row[key] for row in host_rows} for host_rows in rows]
        assert [len(one) for one in names] == [1, 1]
        assert names[0] != names[1]
    assert {tuple(row["cores"]) for host_rows in rows for row in host_rows} == {(last,)}
    assert {row["cwd"] for host_rows in rows for row in host_rows} == {str(tmp_path)}
    assert rows[0][0]["interfaces"] == rows[1][0]["interfaces"] == ["lo", "wire"]


def test_shared_memory_of_one_host_is_not_seen_by_the_other(hosts: TwoHosts) -> None:
    mark = f"mark-of-{os.getpid()}"
    hosts.run(["sh", "-c", f'test "$RANK" = 1 || touch /dev/shm/{mark}'])
    assert [one.out for one in hosts.run(["ls", "/dev/shm"])] == [f"{mark}\n", ""]
    assert not (Path("/dev/shm") / mark).exists()


def test_a_host_ends_with_the_worst_exit_code_of_its_ranks(hosts: TwoHosts) -> None:
    finished = hosts.run(["sh", "-c", 'echo "$RANK" >&2; exit $((7 - RANK))'], 2)
    assert [one.code for one in finished] == [7, 5]
    assert [sorted(one.err.split()) for one in finished] == [["0", "1"], ["2", "3"]]


def test_more_output_than_a_pipe_holds_keeps_neither_host_from_ending(hosts: TwoHosts) -> None:
    finished = hosts.run(["sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x"])
    assert [one.out == "x" * 1_000_000 for one in finished] == [True, True]


@pytest.mark.parametrize("rate", ["1gbit", None])
def test_counters_hold_every_frame_with_its_headers(can_build: None, rate: str | None) -> None:
    with TwoHosts(rate) as hosts:
        before = hosts.nbytes()
        finished = hosts.run([*PROBE, "one", str(NBYTES), "1"])
        after = settled(hosts)
        again = sent_again(hosts)  # which a host does whose acknowledgements a busy machine delays
    assert [one.code for one in finished] == [0, 0], finished
    sender, receiver = (late - early for late, early in zip(after, before, strict=True))
    # 40 bytes of IP and TCP in the 1500 of a frame, or 52 with a time stamp, and 14 of Ethernet.
    least = NBYTES + 54 * math.ceil(NBYTES / 1460)
    most = NBYTES + 66 * math.ceil(NBYTES / 1448)
    assert least <= sender.sent <= 1.01 * most + again * (1500 + 14)
    assert receiver.received == sender.sent
    assert receiver.sent == sender.received
    assert 66 < receiver.sent < 0.1 * NBYTES  # an acknowledgement a frame at most


def test_nothing_is_counted_while_nothing_is_sent(hosts: TwoHosts) -> None:
    hosts.run(["true"])
    assert [(one.sent, one.received) for one in hosts.nbytes()] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("way", ["one", "both"])
def test_no_direction_is_faster_than_its_rate(can_build: None, way: str) -> None:
    with TwoHosts("100mbit") as hosts:
        finished = hosts.run([*PROBE, way, str(NBYTES), "1"])
    assert [one.code for one in finished] == [0, 0], finished
    (taken,) = json.loads(finished[0].out)
    assert taken >= NBYTES / (100e6 / 8)


def test_latency_delays_both_directions_or_is_refused_by_name(can_build: None) -> None:
    try:
        with TwoHosts("1gbit", "5ms") as hosts:
            finished = hosts.run([*PROBE, "one", "1", "3"])
    except NoTestBed as refused:
        assert "netem" in str(refused)  # which not every kernel has
    else:
        assert all(taken >= 2 * 5e-3 for taken in json.loads(finished[0].out))


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (bits_per_s, "100mbit", 1e8),
        (bits_per_s, "1.5gbit", 1.5e9),
        (seconds, "200us", 2e-4),
        (seconds, "0.2ms", 2e-4),
        (seconds, "1s", 1.0),
    ],
)
def test_rates_are_decimal_and_latencies_have_units(read, text: str, expected: float) -> None:
    assert read(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(("rate", one) for one in ("fast", "100", "0mbit", "-1mbit", "1 gbit", "1gbps", "")),
        *(("latency", one) for one in ("1", "0ms", "1min", "ms")),
    ],
)
def test_a_wrong_rate_or_latency_is_refused_before_anything_is_built(field: str, text: str) -> None:
    with refused(field, got=text):
        TwoHosts(**{"rate": None} | {field: text})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("command", {"command": []}),
        ("per_host", {"per_host": 0}),
        ("deadline_s", {"deadline_s": 0}),
    ],
)
def test_a_run_needs_a_command_ranks_and_time(hosts: TwoHosts, field: str, values) -> None:
    with refused(field):
        hosts.run(**{"command": ["true"]} | values)


def test_the_program_prints_what_hosts_wrote_and_ends_with_the_worst_exit_code(
    can_build: None, main: Callable[..., Started]
) -> None:
    script = 'echo "rank $RANK"; echo "to $MASTER_ADDR" >&2; exit $((RANK * 3))'
    finished = main("--rate", "none", "--", "sh", "-c", script).finish()
    assert finished.code == 3
    first, second, summary = finished.out.splitlines()
    assert (first, second) == ("host 0: rank 0", "host 1: rank 1")
    assert finished.err.splitlines() == ["host 0: to 10.77.0.1", "host 1: to 10.77.0.1"]
    assert summary.startswith("host 0 ")


@pytest.mark.parametrize(
    "arguments", [[], ["--"], ["--rate", "fast", "--", "true"], ["--check", "--", "true"]]
)
def test_wrong_arguments_end_with_exit_code_2(
    main: Callable[..., Started], arguments: list[str]
) -> None:
    assert main(*arguments).finish().code == 2


def as_nobody() -> list[str]:
    """A command that runs another as a user without rights, who can run this Python."""
    if os.geteuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("another user needs setpriv")
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    if subprocess.run([*nobody, sys.executable, "-c", "import paceline.core.errors"]).returncode:
        pytest.skip("another user cannot run this Python")
    return nobody


@pytest.mark.parametrize("arguments", [["--check"], ["--", "true"]])
def test_without_root_or_its_tools_it_names_what_it_needs(
    main: Callable[..., Started], tmp_path: Path, arguments: list[str]
) -> None:
    finished = main(*arguments, before=as_nobody()).finish()
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert "root" in line or "iproute2" in line
    finished = main(*arguments, before=["env", f"PATH={tmp_path}"]).finish()
    assert finished.code == 2
    assert "iproute2" in finished.err
    assert "util-linux" in finished.err
