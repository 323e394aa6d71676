import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from host import NoTestBed
from hosts import Traffic, TwoHosts
from wire import bits_per_s, seconds

from paceline.core.errors import InvalidInput
from processes import Started

BED = Path(__file__).parent
PROBE = [sys.executable, str(BED / "probe.py")]
PROGRAMS = Path(__file__).parent / "programs"
NBYTES = 5_000_000


def settled(hosts: TwoHosts) -> tuple[Traffic, Traffic]:
    """The counters, once the last acknowledgements have arrived."""
    before, after = None, hosts.nbytes()
    while before != after:
        time.sleep(0.1)
        before, after = after, hosts.nbytes()
    return after


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
    hosts.run(["sleep", "0.5"])
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


@pytest.mark.parametrize(("rate", "expected"), [("100mbit", 1e8), ("1.5gbit", 1.5e9)])
def test_rates_are_decimal(rate: str, expected: float) -> None:
    assert bits_per_s(rate) == expected


@pytest.mark.parametrize(("latency", "expected"), [("200us", 2e-4), ("0.2ms", 2e-4), ("1s", 1.0)])
def test_latencies_have_units(latency: str, expected: float) -> None:
    assert seconds(latency) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rate", ["fast", "100", "0mbit", "-1mbit", "1 gbit", "1gbps", ""])
def test_a_wrong_rate_is_refused_before_anything_is_built(rate: str) -> None:
    with pytest.raises(InvalidInput, match="rate"):
        TwoHosts(rate)


@pytest.mark.parametrize("latency", ["1", "0ms", "1min", "ms"])
def test_a_wrong_latency_is_refused_before_anything_is_built(latency: str) -> None:
    with pytest.raises(InvalidInput, match="latency"):
        TwoHosts(None, latency)


def test_a_run_needs_a_command_ranks_and_time(hosts: TwoHosts) -> None:
    with pytest.raises(InvalidInput, match="command"):
        hosts.run([])
    with pytest.raises(InvalidInput, match="per_host"):
        hosts.run(["true"], 0)
    with pytest.raises(InvalidInput, match="deadline"):
        hosts.run(["true"], deadline_s=0)


def test_the_program_prints_what_hosts_wrote_and_ends_with_the_worst_exit_code(
    can_build: None, main: Callable[..., Started]
) -> None:
    script = 'echo "rank $RANK"; echo "to $MASTER_ADDR" >&2; exit $((RANK * 3))'
    finished = main("--rate", "none", "--", "sh", "-c", script).finish()
    assert finished.code == 3
    first, second, summary = finished.out.splitlines()
    assert (first, second) == ("host 0: rank 0", "host 1: rank 1")
    assert finished.err.splitlines() == ["host 0: to 10.77.0.1", "host 1: to 10.77.0.1"]
    nothing = "sent 0 bytes and received 0"
    assert summary.startswith(f"host 0 {nothing}; host 1 {nothing} in ")


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
def test_without_root_it_says_what_it_needs(
    main: Callable[..., Started], arguments: list[str]
) -> None:
    finished = main(*arguments, before=as_nobody()).finish()
    assert finished.code == 2
    assert "needs root" in finished.err or "iproute2" in finished.err
    assert len(finished.err.splitlines()) == 1


def test_without_its_tools_it_says_what_it_needs(
    main: Callable[..., Started], tmp_path: Path
) -> None:
    finished = main("--", "true", before=["env", f"PATH={tmp_path}"]).finish()
    assert finished.code == 2
    assert "ip (iproute2)" in finished.err
    assert "unshare (util-linux)" in finished.err
