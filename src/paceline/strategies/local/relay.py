"""The exchanges of a run as the hub relays them, and the group's state, which it keeps.

part of worker 0 ──┐                    ┌── parts of 1 and 2 ──► worker 0
part of worker 1 ──┼── all are there ───┼── parts of 0 and 2 ──► worker 1
part of worker 2 ──┘         │          └── parts of 0 and 1 ──► worker 2
└── the outer step, here too
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from paceline.rpc.frames import Message
from paceline.rpc.server import RpcRequest
from paceline.strategies.local.checkpoints import Checkpoints
from paceline.strategies.local.config import Local
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.gate import Gate, LeftOut, gradient_buffers
from paceline.strategies.local.log import RunLog
from paceline.strategies.local.protocol import (
    PartHeader,
    PartsHeader,
    Share,
    StateHeader,
    Topic,
    UnitsHeader,
    encode,
    joined,
)
from paceline.strategies.local.rounds import Completed, OutOfTurn, Rounds
from paceline.strategies.local.trace import NUM_TRACED, HubTimes, Trace

logger = logging.getLogger(__name__)
Reply = Callable[[RpcRequest, Message], None]


@dataclass(frozen=True)
class Part:
    """A worker's part of an exchange, which waits for the others."""

    request: RpcRequest
    header: PartHeader
    buffers: tuple[Tensor, ...]
    values: Tensor
    of_model: list[Tensor] | None  # at the end of a round: the model's buffers


class Relay:
    """Takes the parts of each exchange, and sends each worker those of the others.

    `buffers` are the group's, such as running means. `reply` sends a reply to a request.
    """

    def __init__(
        self,
        config: Local,
        exchanged: Exchanged,
        buffers: list[Tensor],
        rounds: Rounds[Part],
        gate: Gate,
        log: RunLog,
        checkpoints: Checkpoints,
        reply: Reply,
    ) -> None:
        self._config, self._exchanged, self.buffers = config, exchanged, buffers
        self.rounds, self.gate = rounds, gate
        self._log, self._checkpoints = log, checkpoints
        self._reply = reply
        self._digests: dict[int, str] = {}  # by exchange
        self.first_part_s: float | None = None  # when the hub took the first part of this exchange
        self.times = HubTimes()

    def units(self, worker: int, number: int) -> Message:
        """Return the reply to a worker that asks for the units of a round."""
        dealt = self.rounds.units_of(worker, number)
        if dealt is None:
            header = UnitsHeader(units=(), first_step=0.0, num_steps=0.0, is_over=True)
        else:
            first, num_steps = (count / self._config.workers for count in dealt.steps)
            header = UnitsHeader(units=tuple(dealt.units), first_step=first, num_steps=num_steps)
        return Message(Topic.UNITS, number, parts=(encode(header),))

    def state(self, worker: int) -> Message:
        """Return what a worker begins with: the group's state, and what it has saved."""
        own = self._checkpoints.own_state(worker, self.rounds.exchange)
        place = None if own is None else (own.header.round, own.header.step)
        header = StateHeader(exchange=self.rounds.exchange, place=place)
        outer = self._exchanged.outer
        vectors = joined([*outer.values, *outer.momenta])
        parts = [encode(header), vectors, joined(self.buffers)]
        parts += [] if own is None else [memoryview(own.tensors), memoryview(own.values)]
        return Message(Topic.STATE, parts=tuple(parts))

    def take(self, request: RpcRequest) -> None:
        """Take a worker's part of an exchange.

        Raises LeftOut if it is not like the others, OutOfTurn for another exchange, InvalidInput
        for what cannot be decoded.
        """
        worker, message, started_s = request.worker, request.message, time.monotonic()
        self.rounds.check_turn(worker, message.step)
        header = self.gate.part(message)
        self._check_digest(header.digest, message.step - 1)
        buffers = gradient_buffers(header, message)
        fragment, fragments = message.step % self._config.fragments, self._config.fragments
        steps = self.rounds.members[worker].most_units
        values = self.gate.values(worker, fragment, header, buffers, steps)
        of_model = None
        if fragment == fragments - 1:
            of_model = self.gate.buffers(message, self.buffers)
        self.rounds.post(worker, message.step, Part(request, header, buffers, values, of_model))
        if header.step_s:
            self.rounds.note_speed(worker, header.step_s)
        self.times.received_s[worker, message.step] = request.arrived_s
        self.times.taken_s[worker, message.step] = (started_s, time.monotonic())

    def _check_digest(self, digest: str | None, exchange: int) -> None:
        own = self._digests.get(exchange)
        if None not in (own, digest) and own != digest:
            raise LeftOut(
                f"has a copy of the group's parameters with other bits after exchange {exchange}"
            )

    def finish(self, worker: int, message: Message) -> Trace:
        """Return the trace of a worker that is done. Raises LeftOut if it has other parameters.

        OutOfTurn if there are units left, of workers that were lost meanwhile.
        """
        if worker not in self.rounds.members or not self.rounds.is_over:
            raise OutOfTurn
        header, trace = self.gate.done(worker, message)
        self._check_digest(header.digest, self.rounds.exchange - 1)
        return trace

    def go_on(self, *, stops: bool) -> bool:
        """Complete the exchange if all parts are there; return True if that was a run's last.

        With `stops` that is the next at the end of a round, after which the state is saved.
        """
        stopped = False
        while (completed := self.rounds.complete()) is not None:
            stopped |= self._complete(completed, stops=stops and not stopped)
        return stopped

    def _complete(self, completed: Completed[Part], *, stops: bool) -> bool:
        """Send all workers the parts of the others, and take the outer step."""
        self.first_part_s = None
        exchange, parts = completed.exchange, completed.parts
        for worker, part in parts.items():
            self._log.count(worker, part.header)
        there = [worker for worker in parts if worker in self.rounds.members]
        tests = saves = False
        if completed.ends_round:
            first = next(iter(parts.values()))
            self.buffers = first.of_model or []
            num_steps = self.rounds.num_done // self._config.workers
            tests = self._log.end_round(exchange + 1, num_steps, there)
            stops = stops and not self._checkpoints.is_pending
            saves = stops or self._checkpoints.is_due(num_steps)
        # Before the hub's own step: workers wait for these.
        self.times.replied_s[exchange] = time.monotonic()
        for worker, part in parts.items():
            test = (there.index(worker), len(there)) if tests and worker in there else None
            self._reply(part.request, self._others(worker, completed, test, saves=saves))
        self._step(exchange, parts.values())
        if saves:
            own = exchange + 1, self.rounds, self._log, self.buffers, there
            self._checkpoints.begin(*own, is_last=stops)
        return saves and stops

    def _step(self, exchange: int, parts: Iterable[Part]) -> None:
        """Take the outer step of an exchange, as the workers do."""
        fragments, exchanged = self._config.fragments, self._exchanged
        fragment = exchange % fragments
        exchanged.step(fragment, [(one.header.weight, one.values) for one in parts])
        self._digests[exchange] = exchanged.outer.digest(fragment).hex()
        self._digests.pop(exchange - 2 * fragments, None)
        self.times.summed_s[exchange] = time.monotonic()
        self.times.forget(exchange - NUM_TRACED * fragments)

    def _others(
        self, worker: int, completed: Completed[Part], test: tuple[int, int] | None, *, saves: bool
    ) -> Message:
        """Return the parts of the others as they go to a worker."""
        shares, sent = list[Share](), list[Tensor]()
        for other, part in completed.parts.items():
            sizes = tuple(one.numel() for one in part.buffers) if other != worker else ()
            shares.append(Share(worker=other, weight=part.header.weight, sizes=sizes))
            sent += part.buffers if other != worker else ()
        header = PartsHeader(shares=tuple(shares), test=test, save=saves)
        buffers = joined(self.buffers) if test is not None else memoryview(b"")
        parts = (encode(header), joined(sent), buffers)
        return Message(Topic.PARTS, completed.exchange, parts=parts)
