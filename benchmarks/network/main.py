"""Two hosts on one machine, joined by a wire of a chosen rate and latency: run a command on both.

    python benchmarks/network/main.py --rate 1gbit [--latency 0.2ms] [--per-host 1] -- COMMAND...
    python benchmarks/network/main.py --check

The exit code is that of the worst host, 2 if the hosts cannot be built, and 130 after Ctrl-C.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from host import NoTestBed, missing
from hosts import DEADLINE_S, TIMED_OUT, Finished, Traffic, TwoHosts

from paceline.core.errors import InvalidInput

_NOT_BUILT = 2  # as argparse ends after a wrong argument
_INTERRUPTED = 130


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="measure what the wire delivers")
    parser.add_argument("--rate", default="1gbit", help="of each direction; 'none': unshaped")
    parser.add_argument("--latency", help="of each direction, like 0.2ms")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="in seconds")
    parser.add_argument("command", nargs="*", help="after --, what each rank runs")
    given = parser.parse_args(words)
    if given.check == bool(given.command):
        parser.error("either --check or a COMMAND after -- is needed")
    return given


def _print(finished: Sequence[Finished]) -> None:
    for number, host in enumerate(finished):
        for text, stream in ((host.out, sys.stdout), (host.err, sys.stderr)):
            for line in text.splitlines():
                print(f"host {number}: {line}", file=stream)
        if host.code == TIMED_OUT:
            print(f"host {number}: exit code {TIMED_OUT}, that of the deadline", file=sys.stderr)


def _run(given: argparse.Namespace) -> int:
    rate = None if given.rate == "none" else given.rate
    with TwoHosts(rate, given.latency) as hosts:
        started = time.monotonic()
        finished = hosts.run(given.command, given.per_host, deadline_s=given.deadline)
        seconds = time.monotonic() - started
        traffic = hosts.nbytes()
    _print(finished)
    print(f"{_summary(traffic)} in {seconds:.3f} s")
    return max(host.code for host in finished)


def _summary(traffic: Sequence[Traffic]) -> str:
    return "; ".join(
        f"host {number} sent {host.sent} bytes and received {host.received}"
        for number, host in enumerate(traffic)
    )


def main(words: Sequence[str]) -> int:
    """Run the command or the check; return the exit code."""
    given = _arguments(words)
    try:
        if not given.check:
            return _run(given)
        problem = missing()
        if problem:
            raise NoTestBed(problem)
        from check import check  # imports torch, which a command need not wait for

        check()
    except (InvalidInput, NoTestBed) as problem:
        print(problem, file=sys.stderr)
        return _NOT_BUILT
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
