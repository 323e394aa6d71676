"""Two hosts on one machine: namespaces of their own, joined by a wire of a chosen rate.

with TwoHosts("1gbit") as hosts:
    before = hosts.nbytes()
    finished = hosts.run([sys.executable, "program.py"], per_host=2)
    after = hosts.nbytes()
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import TracebackType
from typing import Any, Self

from host import Host, NoTestBed, checked, missing
from wire import ADDRESSES, INTERFACE, queueing, segment_bytes

DEADLINE_S = 600.0
TIMED_OUT = 124  # the exit code of `timeout`
_PORT = "29555"
_OFFLOAD = str(Path(__file__).with_name("offload.py"))
_RANK = str(Path(__file__).parents[1] / "rank.py")
_RANKS_S = 1200.0  # for the parts that ranks measure
_IPV6 = Path("/proc/sys/net/ipv6")
_RANKS = """
cd "$1" || exit; first=$2; shift 2
n=0; pids=
while [ $n -lt $LOCAL_WORLD_SIZE ]; do
    RANK=$((first + n)) LOCAL_RANK=$n "$@" & pids="$pids $!"
    n=$((n + 1))
done
code=0
for pid in $pids; do
    wait $pid; ended=$?
    if [ $ended -gt $code ]; then code=$ended; fi
done
exit $code
"""


@dataclass(frozen=True)
class Finished:
    """What the ranks of a host ended with: the worst exit code, and what they wrote, as it came.

    A rank that was ended by a signal has exit code 128 + signal, and a host whose ranks were ended
    at the deadline TIMED_OUT.
    """

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Traffic:
    """Bytes of the frames that a host has sent and received, headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class TwoHosts:
    """Two hosts, joined by a wire with this rate and latency in each direction.

    Rates are like "100mbit" and count whole Ethernet frames, latencies like "0.2ms"; None leaves
    the wire as fast as the kernel is. Entering raises NoTestBed if this machine or user cannot
    build the hosts. Leaving, or the end of the process, whatever ends it, ends all that runs on
    them and removes them.
    """

    def __init__(self, rate: str | None = "1gbit", latency: str | None = None) -> None:
        self._queueing = queueing(rate, latency)
        self._segment_bytes = segment_bytes(rate)
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        problem = missing()
        if problem:
            raise NoTestBed(problem)
        with ExitStack() as built:
            hosts = [built.enter_context(closing(Host())) for _ in ADDRESSES]
            self._connect(*hosts)
            self._hosts, self._close = hosts, built.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hosts.clear()
        self._close.close()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The two hosts, while they are there."""
        return tuple(self._hosts)

    def run(
        self,
        command: Sequence[str],
        per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        *,
        cores: tuple[int, int] | None = None,
        cwd: Path | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> tuple[Finished, Finished]:
        """Run a command as so many ranks on each host at once, and wait for all of them.

        The ranks find each other as torch's do: in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, beside the variables of this process and
        those of `environment`, which win. The process numbers and files of /proc that they see are
        those of their host. `cores` gives each host the one core that its ranks may use.
        """
        variables = os.environ | {
            "WORLD_SIZE": str(len(ADDRESSES) * per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        ranks = ["timeout", str(deadline_s), "sh", "-c", _RANKS, "ranks", str(cwd or Path.cwd())]
        commands = [
            host.on_host(*pinned, *ranks, str(number * per_host), *command)
            for number, (host, pinned) in enumerate(zip(self._hosts, _pins(cores), strict=True))
        ]
        first, second = _finished(commands, variables | dict(environment or {}))
        return first, second

    def checked(self, command: Sequence[str], *arguments: Any, **options: Any) -> str:
        """Run a command as `run` does; return what host 0 wrote. RuntimeError if a rank fails."""
        finished = self.run(command, *arguments, **options)
        if any(one.code for one in finished):
            raise RuntimeError("\n".join(one.err for one in finished))
        return finished[0].out

    def nbytes(self) -> tuple[Traffic, Traffic]:
        """Return what the interface of each host has sent and received since it was made.

        What still waits for its turn at the rate, or for its latency, is counted by neither.
        """
        first, second = (_traffic(host) for host in self._hosts)
        return first, second

    def _connect(self, here: Host, there: Host) -> None:
        peer = ["peer", "name", INTERFACE, "netns", str(there.pid)]
        checked(here.in_network("ip", "link", "add", INTERFACE, "type", "veth", *peer))
        settings = ["gso_max_size", str(self._segment_bytes)]
        # Without an IPv6 address the kernel sends nothing on its own that would be counted.
        settings += ["addrgenmode", "none"] if _IPV6.exists() else []
        for host, address in zip((here, there), ADDRESSES, strict=True):
            checked(host.in_network(sys.executable, "-IS", _OFFLOAD, INTERFACE))
            place = ["dev", INTERFACE]
            checked(host.in_network("ip", "address", "add", f"{address}/24", *place))
            checked(host.in_network("ip", "link", "set", *place, *settings, "up"))
            checked(host.in_network("ip", "link", "set", "dev", "lo", "up"))
            for arguments in self._queueing:
                _shape(host, arguments)


def on_hosts(
    hosts: TwoHosts,
    folder: Path,
    part: str,
    quick: bool,
    cases: Sequence[str] = (),
    *,
    per_host: int = 1,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a part, a module of that folder, on one core of each host; return rank 0's figures.

    `cases` are handed to the part's `measure`.
    """
    with TemporaryDirectory() as temporary:
        output = Path(temporary) / "figures.json"
        command = [sys.executable, _RANK, str(folder), part, str(output)]
        command += [f"--case={case}" for case in cases] + (["--quick"] if quick else [])
        place = {"cores": (0, 1), "cwd": folder, "deadline_s": _RANKS_S}
        hosts.checked(command, per_host, environment, **place)
        figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def _shape(host: Host, arguments: list[str]) -> None:
    try:
        checked(host.in_network("tc", *arguments))
    except NoTestBed as failed:
        needed = "a rate needs tbf in the kernel, and a latency netem"
        raise NoTestBed(f"{failed} ({needed})") from None


def _pins(cores: tuple[int, int] | None) -> list[list[str]]:
    if cores is None:
        return [[] for _ in ADDRESSES]
    return [["taskset", "--cpu-list", str(core)] for core in cores]


def _finished(commands: list[list[str]], variables: dict[str, str]) -> list[Finished]:
    """Run the commands at once, and return how they ended; whatever happens, none is left."""
    with ExitStack() as files:
        # Files, not pipes: a host need not wait for somebody to read what it writes.
        outputs = [[files.enter_context(TemporaryFile()) for _ in range(2)] for _ in commands]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, (out, err) in zip(commands, outputs, strict=True):
                processes.append(
                    subprocess.Popen(
                        command,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for file in (file for pair in outputs for file in pair):
            file.seek(0)
        texts = [[file.read().decode(errors="replace") for file in pair] for pair in outputs]
    return [Finished(code, *pair) for code, pair in zip(codes, texts, strict=True)]


def _traffic(host: Host) -> Traffic:
    shown = checked(host.in_network("ip", "-s", "-j", "link", "show", "dev", INTERFACE))
    counters = json.loads(shown)[0]["stats64"]
    return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"])
