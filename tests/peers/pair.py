"""The two ranks that run tests: started together, asked together, ended together."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.links.forkserver import ADDRESS
from paceline.links.processes import Process, fork

NUM_RANKS = 2
START_S = 240.0  # for two imports of torch on a busy machine
TEST_S = 120.0  # longer than a collective waits: what takes that long hangs
OTHER_S = 75.0  # for a rank whose peer has failed: longer than it may wait for that one
WORDS = ("passed", "skipped", "raised", "hung", "crashed")  # the worst of a pair is its outcome

Answers = dict[int, dict[str, str]]  # of ranks, in the order in which they came


@dataclass(frozen=True)
class Outcome:
    """What came of one test on a pair of ranks."""

    test: str
    outcome: str
    ranks: list[str]
    error: str  # of the rank that ended first: the other's may only follow from it
    statements: str  # of torch's tests, at which it ended
    details: str  # its traceback, and what ranks have printed that did not answer
    seconds: float


class Pair:
    """Two ranks with a stand-in for DDP. None is left after `close`, nor after one has failed."""

    def __init__(self, stand_in: str) -> None:
        self._answers: queue.Queue[tuple[int, str]] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [Path(self._folder.name, f"rank{rank}") for rank in range(NUM_RANKS)]
        self._ranks: list[Process] = []
        self._questions: list[IO[str]] = []  # the standard input of each rank
        for rank in range(NUM_RANKS):
            process, questions, answers = self._started(stand_in, rank)
            self._ranks.append(process)
            self._questions.append(questions)
            threading.Thread(target=self._listen, args=(rank, answers), daemon=True).start()
        if not _complete(self._wait(START_S)):
            raise RuntimeError(f"the ranks did not start: {self._end()}")
        self.usable = True

    def _started(self, stand_in: str, rank: int) -> tuple[Process, IO[str], IO[str]]:
        """Start a rank, forked if that can be; return it, its standard input and its output."""
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(rank), stand_in]
        more = {"PYTORCH_PRINT_REPRO_ON_FAILURE": "0", "CUDA_VISIBLE_DEVICES": ""}
        environment = os.environ | more | {"OMP_NUM_THREADS": "1"}
        (stdin, questions), (answers, stdout) = os.pipe(), os.pipe()
        with self._logs[rank].open("w") as log:
            if ADDRESS in os.environ:
                process: Process = fork(
                    command, environment, {0: stdin, 1: stdout, 2: log.fileno()}
                )
            else:
                popen = subprocess.Popen(
                    command, env=environment, stdin=stdin, stdout=stdout, stderr=log
                )
                process = Process(popen)
        os.close(stdin)
        os.close(stdout)
        return process, os.fdopen(questions, "w"), os.fdopen(answers)

    def _listen(self, rank: int, answers: IO[str]) -> None:
        for line in answers:
            self._answers.put((rank, line))
        self._answers.put((rank, "{}"))  # it has ended

    def run(self, test: str) -> Outcome:
        """Run one test. Where a rank crashed or hung, the pair has ended: it is not `usable`."""
        started = time.monotonic()
        # Kept as long as the ranks: these destroy their store after they have answered, and where
        # its folder disappears meanwhile, torch's FileStore waits minutes for it to come back.
        folder = tempfile.mkdtemp(dir=self._folder.name)
        Path(folder, "barrier").mkdir()  # torch's tests expect it
        self._tell({"test": test, "folder": folder})
        said = self._wait(TEST_S)
        log = "" if _complete(said) else self._end(said)
        first = next((answer for answer in said.values() if answer.get("error")), {})
        ranks = [_word(said.get(rank)) for rank in range(NUM_RANKS)]
        return Outcome(
            test,
            max(ranks, key=WORDS.index),
            ranks,
            first.get("error", ""),
            first.get("statements", ""),
            f"{first.get('traceback', '')}{log}",
            round(time.monotonic() - started, 3),
        )

    def _tell(self, what: dict[str, str]) -> None:
        for questions in self._questions:
            with contextlib.suppress(BrokenPipeError):  # what has ended does not answer either
                print(json.dumps(what), file=questions, flush=True)

    def _wait(self, limit_s: float) -> Answers:
        """Return what the ranks answer until the deadline: nothing, {}, of one that has ended."""
        said: Answers = {}
        until = time.monotonic() + limit_s
        while len(said) < NUM_RANKS:
            try:
                rank, line = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            said[rank] = json.loads(line)
            if _word(said[rank]) != "passed":
                until = min(until, time.monotonic() + OTHER_S)
        return said

    def _end(self, said: Answers | None = None) -> str:
        """End the pair; return what it has printed, and where ranks are that have not answered."""
        for rank, process in enumerate(self._ranks):
            if rank not in (said or {}):
                process.send(signal.SIGUSR1)  # it prints its stacks
        time.sleep(1.0)
        printed = [log.read_text(errors="replace")[-6000:] for log in self._logs]
        self.close()
        return "\n".join(f"rank {rank} has printed:\n{text}" for rank, text in enumerate(printed))

    def close(self) -> None:
        self.usable = False
        for process in self._ranks:
            process.close()
        for questions in self._questions:
            with contextlib.suppress(BrokenPipeError):
                questions.close()
        self._folder.cleanup()


def _complete(said: Answers) -> bool:
    return len(said) == NUM_RANKS and all(said.values())


def _word(answer: dict[str, str] | None) -> str:
    if answer is None:
        return "hung"
    return answer["outcome"] if answer else "crashed"
