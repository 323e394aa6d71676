"""Build two hosts on one machine, joined by a wire with a given rate and latency.

with TwoHosts("1gbit") as hosts:
    before = hosts.nbytes()
    finished = hosts.run([sys.executable, "program.py"], per_host=2)
    after = hosts.nbytes()
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

from host import Host, NoTestBed, checked, missing
from wire import ADDRESSES, INTERFACE, bits_per_s, queueing, segment_bytes

DEADLINE_S = 600.0
TIMED_OUT = 124  # the exit code of `timeout`
_PORT = "29555"
_DELAY = str(Path(__file__).with_name("delay.py"))
_OFFLOAD = str(Path(__file__).with_name("offload.py"))
_RANK = str(Path(__file__).parents[1] / "rank.py")
_RANKS_S = 1200.0  # deadline for a benchmark part
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


class Finished(NamedTuple):
    """The highest exit code of a host's ranks, and their interleaved stdout and stderr.

    A rank that a signal ended has exit code 128 + signal. `code` is TIMED_OUT if the ranks reached
    the deadline.
    """

    code: int
    out: str
    err: str


class Traffic(NamedTuple):
    """Bytes of the frames that a host has sent and received, including headers."""

    sent: int
    received: int

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class TwoHosts:
    """Two hosts joined by a wire with the given rate and latency in each direction.

    Rates such as "100mbit" count whole Ethernet frames. Latencies are strings such as "0.2ms". None
    adds no limit. Entering raises NoTestBed if this machine or user cannot build the hosts. Leaving
    ends all processes on the hosts and removes the hosts, and so does any end of this process.
    """

    def __init__(self, rate: str | None = "1gbit", latency: str | None = None) -> None:
        if latency is not None and rate is None:
            raise ValueError("a wire with a latency needs a rate")
        self._rate, self._latency = rate, latency
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        problem = missing()
        if problem:
            raise NoTestBed(problem)
        with ExitStack() as built:
            hosts = [built.enter_context(closing(Host())) for _ in ADDRESSES]
            if self._latency is None:
                self._connect(*hosts)
            else:
                built.enter_context(self._delayed(*hosts))
            for host, address in zip(hosts, ADDRESSES, strict=True):
                self._configure(host, address)
            self._hosts, self._close = hosts, built.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._hosts.clear()
        self._close.close()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The two hosts; empty before entering and after leaving."""
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
        """Run a command as `per_host` ranks on each host, and wait for all ranks.

        Each rank has torch's variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT and GLOO_SOCKET_IFNAME. They replace variables of this process; `environment`
        replaces all but RANK and LOCAL_RANK. Ranks see only the processes and the /proc of this
        command on their host. `cores` pins all ranks of a host to one core.
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
        """Run a command as `run` does; return host 0's stdout. RuntimeError if a rank fails."""
        finished = self.run(command, *arguments, **options)
        if any(one.code for one in finished):
            raise RuntimeError("\n".join(one.err for one in finished))
        return finished[0].out

    def nbytes(self) -> tuple[Traffic, Traffic]:
        """Return the bytes that each host has sent and received over the wire so far.

        Frames that still wait for the rate or the latency are not counted on either host.
        """
        first, second = (_traffic(host) for host in self._hosts)
        return first, second

    def _connect(self, here: Host, there: Host) -> None:
        peer = ["peer", "name", INTERFACE, "netns", str(there.pid)]
        checked(here.in_network("ip", "link", "add", INTERFACE, "type", "veth", *peer))
        for host in (here, there):
            checked(host.in_network(sys.executable, "-IS", _OFFLOAD, INTERFACE))
            segments = ["gso_max_size", str(segment_bytes(self._rate))]
            checked(host.in_network("ip", "link", "set", "dev", INTERFACE, *segments))
            if arguments := queueing(self._rate):
                checked(host.in_network("tc", *arguments))

    @contextmanager
    def _delayed(self, here: Host, there: Host) -> Iterator[None]:
        """Start the process that is the wire; it ends with this process, whatever ends it."""
        assert self._rate is not None
        assert self._latency is not None
        wire = str(bits_per_s(self._rate)), str(float(self._latency.removesuffix("ms")) / 1e3)
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-I", _DELAY, INTERFACE]
        command += [str(here.pid), str(there.pid), *wire]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                if process.stdout.readline() != "ready\n":
                    raise NoTestBed("a wire with a latency needs /dev/net/tun")
                yield
            finally:
                process.kill()

    def _configure(self, host: Host, address: str) -> None:
        # With an IPv6 address the kernel would send frames itself, which the counters include.
        settings = ["addrgenmode", "none"] if _IPV6.exists() else []
        checked(host.in_network("ip", "address", "add", f"{address}/24", "dev", INTERFACE))
        checked(host.in_network("ip", "link", "set", "dev", INTERFACE, *settings, "up"))
        checked(host.in_network("ip", "link", "set", "dev", "lo", "up"))


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
    """Run a benchmark part on one core of each host; return rank 0's figures.

    `part` is a module in `folder`. Its `measure` receives `cases` as arguments.
    """
    with TemporaryDirectory() as temporary:
        output = Path(temporary) / "figures.json"
        command = [sys.executable, _RANK, str(folder), part, str(output)]
        command += [f"--case={case}" for case in cases] + (["--quick"] if quick else [])
        place = {"cores": (0, 1), "cwd": folder, "deadline_s": _RANKS_S}
        hosts.checked(command, per_host, environment, **place)
        figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def _pins(cores: tuple[int, int] | None) -> list[list[str]]:
    if cores is None:
        return [[] for _ in ADDRESSES]
    return [["taskset", "--cpu-list", str(core)] for core in cores]


def _finished(commands: list[list[str]], variables: dict[str, str]) -> list[Finished]:
    """Run the commands concurrently; kill those that still run if an error occurs."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        # Files, because a rank that writes to a full pipe would block.
        outputs = [
            [Path(name, f"{i}.{kind}") for kind in ("out", "err")] for i in range(len(commands))
        ]
        started = []
        for command, paths in zip(commands, outputs, strict=True):
            out, err = (stack.enter_context(path.open("wb")) for path in paths)
            known = {"env": variables, "stdin": subprocess.DEVNULL, "start_new_session": True}
            started.append(subprocess.Popen(command, stdout=out, stderr=err, **known))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        codes = [process.wait() for process in started]
        texts = [[path.read_text(errors="replace") for path in paths] for paths in outputs]
    return [Finished(code, *pair) for code, pair in zip(codes, texts, strict=True)]


def _traffic(host: Host) -> Traffic:
    shown = checked(host.in_network("ip", "-s", "-j", "link", "show", "dev", INTERFACE))
    counters = json.loads(shown)[0]["stats64"]
    return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"])
