"""Two hosts on one machine: network and process namespaces of their own, joined by a wire."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import Finished, Started

PORT = 29555
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_RANK = (
    "RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local} LOCAL_WORLD_SIZE={per_host} {program} & "
    'pids="$pids $!";'
)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces whose interfaces `wire` are joined."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    names = (f"paceline-{os.getpid()}-a", f"paceline-{os.getpid()}-b")
    try:
        for name in names:
            _ip("netns", "add", name)
        peer = ("peer", "name", "wire", "netns", names[1])
        _ip("link", "add", "wire", "netns", names[0], "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for interface in ("wire", "lo"):
                _ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def on_hosts(hosts: tuple[str, str], tmp_path: Path) -> Iterator[Callable[..., list[Finished]]]:
    """Run `python PROGRAM ARGUMENTS` as so many ranks on each host, and wait for both hosts.

    Ranks of two hosts see each other only through the wire: process numbers and files of /proc are
    those of their own host.
    """
    started: list[Started] = []

    def run(per_host: int, *arguments: str) -> list[Finished]:
        for number, name in enumerate(hosts):
            ranks = "".join(
                _RANK.format(
                    rank=number * per_host + local,
                    world=2 * per_host,
                    local=local,
                    per_host=per_host,
                    program=" ".join([sys.executable, *arguments]),
                )
                for local in range(per_host)
            )
            place = (
                f"export MASTER_ADDR={ADDRESSES[0]} MASTER_PORT={PORT} GLOO_SOCKET_IFNAME=wire; "
                f"{ranks} code=0; for pid in $pids; do wait $pid || code=1; done; exit $code"
            )
            own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
            command = ["ip", "netns", "exec", name, *own, "bash", "-c", place]
            started.append(Started(command, tmp_path))
        return [one.finish() for one in started]

    yield run
    for one in started:
        one.kill()
        one.process.wait()
