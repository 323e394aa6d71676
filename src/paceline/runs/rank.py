"""Run a function as one rank of a group, handle signals, and print errors as one line."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from paceline.core.error_lines import DEBUG, error_line, exit_code
from paceline.core.errors import Interrupted, WorkersFailed
from paceline.links.cores import share_cores
from paceline.links.failpoints import reach
from paceline.links.failures import REPORTED, STOPPED, publish, tell_left
from paceline.links.group import Group
from paceline.links.memory import keep_memory
from paceline.links.processes import is_started_by_parent
from paceline.links.rendezvous import process_group
from paceline.links.signals import handled_by, participle, say
from paceline.report.terminal import log_to_stderr


def as_rank(
    carry_out: Callable[[Group], None],
    deadline_s: float,
    device: torch.device | None = None,
    *,
    exchanges_alone: bool = False,
) -> int:
    """Run `carry_out` as one rank, print an error as one line, and return the exit code.

    `device`: by default the rank's GPU, or the CPU if the machine has no GPU. `exchanges_alone`: a
    single rank exchanges gradients with itself.
    """
    rank = os.environ.get("RANK", "0")
    keep_memory()  # torchrun does not set malloc's environment variables
    log_to_stderr(quiet=rank != "0")
    group: Group | None = None
    early: list[int] = []  # signals that arrive before the ranks connect

    def handle(number: int, _: object) -> None:
        if group is None:
            early.append(number)
        else:
            _signalled(group, number)

    with handled_by(handle):
        reach("rank.started", worker=int(rank))
        try:
            with process_group(deadline_s, device, exchanges_alone=exchanges_alone) as group:
                # Pin this thread after the process group has started its threads, which use all
                # cores.
                share_cores(group.device)
                if early:
                    _signalled(group, early[0])
                reach("rank.met", worker=group.rank)
                try:
                    carry_out(group)
                except Interrupted as error:  # a signal stopped the run after a step
                    if group.rank == 0:
                        publish(group.store, STOPPED, error)
                        say(str(error))
                    return error.exit_code
        except WorkersFailed as error:
            return error.exit_code
        except (Exception, SystemExit) as error:
            if early and group is None:  # connecting failed, as another rank exited on the signal
                return 128 + early[0]
            return _report(error, rank, group)
    return 0


def _report(error: Exception | SystemExit, rank: str, group: Group | None) -> int:
    """Print one line about this rank's error, and return its exit code."""
    if DEBUG in os.environ:
        traceback.print_exc()
    sys.stderr.write(f"paceline: {error_line(error, rank)}\n")
    if group is not None:
        publish(group.store, REPORTED)
    return exit_code(error)


def _signalled(group: Group, number: int) -> None:
    """Exit on a signal that arrives outside of training steps, when there is nothing to save.

    If another rank has died, SIGTERM is ignored, because torchrun sends it to all survivors. This
    rank then fails by itself, and reports which rank died, before torchrun kills it.
    """
    if number == signal.SIGTERM and group.dead():
        return
    is_first = tell_left(group, number)
    if is_first and not is_started_by_parent():  # a launcher would report the signal itself
        name = f" by a signal to worker {group.rank}" if group.world_size > 1 else ""
        say(f"{participle(number)}{name}")
    os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """Exit this process immediately.

    sys.exit is not enough: threads of the process group may wait forever for a dead peer, and
    sometimes abort a process that has finished its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
