"""Test the namespaces, rates and counters of two hosts; all network figures depend on them."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Traffic, TwoHosts

from faults import told
from processes import has_ended

BED = Path(__file__).parents[2] / "benchmarks" / "network"
TRANSFER = [sys.executable, str(Path(__file__).parent / "programs" / "transfer.py")]
NBYTES = 5_000_000
# Print a rank's variables, namespaces, core, folder and interfaces in one line.
ABOUT = """
core=$(sed -n 's/Cpus_allowed_list:\t//p' /proc/self/status)
echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GLOO_SOCKET_IFNAME $OWN \
    $(readlink /proc/self/ns/net /proc/self/ns/pid) $core $PWD $(ls /sys/class/net)
"""
# Write the network namespace to a FIFO, and wait forever.
WAITING = ["sh", "-c", 'readlink /proc/self/ns/net > "$0"; exec sleep infinity']
pytestmark = pytest.mark.slow


def settled(hosts: TwoHosts) -> tuple[Traffic, Traffic]:
    """Return the counters once all sent frames have arrived."""
    while True:
        one, other = hosts.nbytes()
        if (one.sent, one.received) == (other.received, other.sent):
            return one, other


def num_resent(hosts: TwoHosts) -> int:
    """Return the number of TCP segments that host 0's kernel has retransmitted."""
    names, values = (
        line.split() for line in hosts.checked(["grep", "^Tcp:", "/proc/net/snmp"]).splitlines()
    )
    return int(values[names.index("RetransSegs")])


def test_ranks_of_two_hosts_have_their_numbers_and_share_no_namespace(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    last = max(os.sched_getaffinity(0))
    finished = hosts.run(["sh", "-c", ABOUT], 2, {"OWN": "yes"}, cores=(last, last), cwd=tmp_path)
    assert [one.code for one in finished] == [0, 0], finished
    rows = [[line.split() for line in one.out.splitlines()] for one in finished]
    ranks = sorted(row[:6] for host_rows in rows for row in host_rows)
    assert ranks == [[str(n), "4", str(n % 2), "2", "wire", "yes"] for n in range(4)]
    for place in (6, 7):
        names = [{row[place] for row in host_rows} for host_rows in rows]
        assert [len(one) for one in names] == [1, 1]
        assert names[0] != names[1]
    places = {tuple(row[8:]) for host_rows in rows for row in host_rows}
    assert places == {(str(last), str(tmp_path), "lo", "wire")}


def test_shared_memory_of_one_host_is_not_seen_by_the_other(hosts: TwoHosts) -> None:
    mark = f"mark-of-{os.getpid()}"
    hosts.run(["sh", "-c", f'test "$RANK" = 1 || touch /dev/shm/{mark}'])
    assert [one.out for one in hosts.run(["ls", "/dev/shm"])] == [f"{mark}\n", ""]


def test_a_host_ends_with_the_worst_exit_code_of_its_ranks(hosts: TwoHosts) -> None:
    finished = hosts.run(["sh", "-c", 'echo "$RANK" >&2; exit $((7 - RANK))'], 2)
    assert [one.code for one in finished] == [7, 5]
    with pytest.raises(RuntimeError, match="1"):
        hosts.checked(["sh", "-c", 'echo "$RANK" >&2; exit $RANK'])


@pytest.mark.parametrize("rate", ["1gbit", None])
def test_counters_hold_every_frame_with_its_headers(can_build: None, rate: str | None) -> None:
    with TwoHosts(rate) as hosts:
        before = hosts.nbytes()
        hosts.checked([*TRANSFER, "one", str(NBYTES)])
        after = settled(hosts)
        resent = num_resent(hosts)  # if a busy machine delays acknowledgements
    sender, receiver = (late - early for late, early in zip(after, before, strict=True))
    # A frame has 14 bytes of Ethernet and 1500 of IP: 40 are headers, or 52 with a time stamp.
    least = NBYTES + 54 * math.ceil(NBYTES / 1460)
    most = NBYTES + 66 * math.ceil(NBYTES / 1448)
    assert least <= sender.sent <= 1.01 * most + resent * (1500 + 14)
    assert receiver.received == sender.sent
    assert receiver.sent == sender.received
    assert 66 < receiver.sent < 0.1 * NBYTES  # at most one acknowledgement per frame


@pytest.mark.parametrize("way", ["one", "both"])
@pytest.mark.parametrize(("latency", "latency_s"), [(None, 0.0), ("5ms", 5e-3)])
def test_no_direction_is_faster_than_its_rate(
    can_build: None, way: str, latency: str | None, latency_s: float
) -> None:
    with TwoHosts("100mbit", latency) as hosts:
        taken_s = float(hosts.checked([*TRANSFER, way, str(NBYTES)]))
    assert taken_s >= NBYTES / (100e6 / 8) + latency_s


def test_latency_delays_both_directions(can_build: None) -> None:
    with TwoHosts("1gbit", "5ms") as hosts:
        taken_s = float(hosts.checked([*TRANSFER, "one", "1"]))
    assert taken_s >= 2 * 5e-3


def test_hosts_end_with_the_program_that_created_them(can_build: None, tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from hosts import TwoHosts\n"
    program += "with TwoHosts(None) as hosts: hosts.run(sys.argv[2:])"
    words = [str(BED), *WAITING, str(tmp_path / "networks")]
    with told(tmp_path / "networks") as names:
        started = subprocess.Popen([sys.executable, "-c", program, *words])
        networks = {names.readline().strip() for _ in range(2)}
        left = [
            int(one.parents[1].name)
            for one in Path("/proc").glob("[0-9]*/ns/net")
            if os.access(one, os.R_OK) and str(one.readlink()) in networks
        ]
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert len(left) > 2
    assert all(map(has_ended, left))
