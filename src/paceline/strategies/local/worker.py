"""The process of one worker: rounds of inner steps, and what it sends to and gets from the hub.

    inner steps   | delay | inner steps      | delay | ...
    fragment 0    ^ sent  v outer step
    fragment 1                               ^ sent  v outer step

A hub starts such a process for each device of its own machine; `paceline worker` is the same on
another.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from safetensors.torch import load as tensors_of_bytes
from safetensors.torch import save as bytes_of_tensors

from paceline.checkpoints import json_values
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.devices import (
    device_named,
    device_of,
    first_device,
    random_numbers_restored,
)
from paceline.exchange.setup import TrainingSetup, setup_for
from paceline.links.failpoints import reach
from paceline.links.group import Group, boot_id
from paceline.rpc.client import Client, HubRestarted, ReplyFuture
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.workers import StepGivenUp, check_reply, run_as_process, until_told
from paceline.strategies.local.config import Local
from paceline.strategies.local.measure import device_profile
from paceline.strategies.local.protocol import (
    Done,
    PartHeader,
    PartsHeader,
    RunSpec,
    SavedHeader,
    StateHeader,
    Tested,
    Topic,
    UnitsHeader,
    bytes_of,
    decode,
    encode,
    joined,
    layout_of,
    tensor_of,
    vectors_of,
)
from paceline.strategies.local.trace import BESIDE, GRADIENT, Trace
from paceline.strategies.local.trainer import Trainer

logger = logging.getLogger("paceline.worker")  # this module is also run as __main__
_NUM_PINGS = 32


class Travelling(NamedTuple):
    """A fragment of which this worker has sent its part, and has not got the others'."""

    exchange: int
    fragment: int
    weight: int
    own: tuple[torch.Tensor, ...]
    reply: ReplyFuture
    steps_left: int


class LocalWorker:
    """A worker: its replica, and its connection to the hub."""

    def __init__(self, number: int, client: Client, spec: RunSpec, device: torch.device) -> None:
        self._number, self._client, self._spec = number, client, spec
        self._config: Local = spec.config
        self._setup, self._device = setup_in(spec, number, device), device
        seed = spec.settings.seed if isinstance(spec.settings, TrainSettings) else 0
        self._trainer = Trainer(self._setup, spec.config, group_of(spec, number, device), seed)
        self._trace = Trace(number)
        self._resumed_at: tuple[int, int] | None = None
        self._exchange = 0
        self._travelling: Travelling | None = None
        self._digest: str | None = None

    def run(self) -> None:
        """Take part until all units of the run are trained on."""
        layout = memoryview(layout_of(self._setup, self._spec).encode())
        self._trainer.stretch()
        while True:
            try:
                self._take_over(self._ask(Topic.BEGIN, layout))
                self._train()
                trace = self._trace.moved(-self._ahead_s())
                self._ask(
                    Topic.DONE, encode(Done(digest=self._digest)), memoryview(trace.as_json())
                )
                return
            except HubRestarted:
                logger.info("worker %d: the hub has restarted", self._number)
            except StepGivenUp:
                logger.info("worker %d: left out; it goes on as the group is", self._number)
            self._travelling = None

    def profile(self) -> None:
        """Measure the device and the link to the hub, and send the profile to the hub."""

        def exchange(up: int, down: int) -> None:
            self._ask(Topic.PROBE, memoryview(bytes(up)), step=down)

        group = Group.alone(self._device, self._spec.settings.deadline_s)
        nbytes = sum(one.nbytes for one in self._trainer.exchanged.outer.values)
        # As many steps as fit into the time: training must not depend on what they draw.
        with random_numbers_restored({self._device}):
            reach("worker.profiling", worker=self._number)
            found = device_profile(self._setup, self._spec, group, exchange, nbytes)
        self._ask(Topic.PROFILE, encode(found))

    def close(self) -> None:
        """End the threads of the worker."""
        self._trainer.close()

    def _take_over(self, reply: Message) -> None:
        """Take the group's state, and what this worker has saved of its own."""
        header = decode(StateHeader, reply)
        trainer, outer = self._trainer, self._trainer.exchanged.outer
        vectors = vectors_of(reply.parts[1], [*outer.values, *outer.momenta])
        buffers = vectors_of(reply.parts[2], [*trainer.model.buffers()])
        trainer.take_over(vectors, buffers)
        self._exchange, self._digest = header.exchange, None
        self._resumed_at = header.place
        if header.place is not None:
            values = json_values.loads(bytes(reply.parts[4]))
            trainer.load((tensors_of_bytes(bytes(reply.parts[3])), values))

    def _train(self) -> None:
        fragments = self._config.fragments
        number = self._exchange // fragments
        done = 0
        if self._resumed_at is not None:
            number, done = self._resumed_at
        units = self._units_of(number)
        while not units.is_over:
            current = self._trainer.begin(number, units, done)
            self._trace.forget(number, fragments)
            number, done = number + 1, 0
            following: UnitsHeader | None = None
            for fragment in range(self._exchange % fragments, fragments):
                self._go_on_to(self._config.sent_after(fragment, len(current.units)))
                if fragment == fragments - 1 and self._config.delay:
                    # Asked before the last fragment is sent, behind which it would have to wait.
                    following = self._units_of(number)
                self._send(fragment, len(current.units))
                if not self._travelling_steps:
                    self._receive()
            if following is None or following.is_over:
                self._receive()
                following = self._units_of(number)  # others may have been lost meanwhile
            units = following

    @property
    def _travelling_steps(self) -> int:
        return 0 if self._travelling is None else self._travelling.steps_left

    def _units_of(self, number: int) -> UnitsHeader:
        return decode(UnitsHeader, self._ask(Topic.ROUND, step=number))

    def _go_on_to(self, step: int) -> None:
        """Take the inner steps of the round up to this one, and receive what travels in between."""
        trainer = self._trainer
        assert trainer.round is not None
        part = str(self._exchange % self._config.fragments)
        left = step - trainer.round.done
        if self._travelling is not None:
            beside = min(left, self._travelling.steps_left)
            self._take(beside, f"{part}{BESIDE}")
            left -= beside
            # Also in a round that has fewer steps: one fragment travels at a time.
            self._receive()
        self._take(left, part)

    def _take(self, count: int, part: str) -> None:
        if count:
            with self._trace.span(Kind.TRAIN, self._exchange // self._config.fragments, part):
                self._trainer.take(count)

    def _send(self, fragment: int, num_steps: int) -> None:
        """Send this worker's part of the exchange."""
        trainer, is_last = self._trainer, fragment == self._config.fragments - 1
        number = self._exchange // self._config.fragments
        with self._trace.span(Kind.REDUCE, number, f"{fragment}{GRADIENT}"):
            weight, gradient = trainer.outgoing(fragment)
        with self._encoding(number, str(fragment)):
            # None if parameters are NaN or infinite.
            own = trainer.exchanged.encode(fragment, gradient)
        # Running means: whoever is first of those that are there tells them to the others.
        buffers = [*trainer.model.buffers()] if is_last else []
        header = PartHeader(
            weight=weight,
            num_steps=num_steps,
            is_finite=own is not None,
            digest=self._digest,
            step_s=trainer.step_s(),
            losses=trainer.losses(),
            num_buffers=0 if own is None else len(own),
        )
        parts = [encode(header), *(bytes_of(one.contiguous()) for one in own or ())]
        parts.append(joined(buffers))
        message = Message(Topic.PART, self._exchange, parts=tuple(parts))
        self._trace.sent_s[self._exchange] = time.monotonic()
        reply = self._client.request(message)
        delay = self._config.delay_of(num_steps)
        self._travelling = Travelling(
            *(self._exchange, fragment, weight, own or (), reply, delay),
        )
        reach("worker.pushed", worker=self._number, step=self._exchange)
        self._exchange += 1
        if own is None:
            trainer.reset_optimizer()  # which has NaN in it, too
            check_reply(reply.result())  # it is told to begin again
            raise StepGivenUp

    def _encoding(self, number: int, part: str) -> AbstractContextManager[None]:
        if self._config.codec is None:
            return nullcontext()
        return self._trace.span(Kind.ENCODE, number, part)

    def _receive(self) -> None:
        """Wait for the others' parts of what travels, and take the outer step."""
        travelling, self._travelling = self._travelling, None
        if travelling is None:
            return
        reply = check_reply(travelling.reply.result())
        self._trace.received_s[travelling.exchange] = travelling.reply.arrived_s
        header, fragment = decode(PartsHeader, reply), travelling.fragment
        exchanged, number = self._trainer.exchanged, travelling.exchange // self._config.fragments
        parts = []
        with self._trace.span(Kind.DECODE, number, str(fragment)):
            sizes = [size for share in header.shares for size in share.sizes]
            split = iter(tensor_of(reply.parts[1]).split(sizes) if sizes else ())
            for share in header.shares:
                buffers = [next(split) for _ in share.sizes] or list(travelling.own)
                parts.append((share.weight, exchanged.decode(fragment, buffers)))
        with self._trace.span(Kind.STEP, number, str(fragment)):
            self._trainer.receive(fragment, parts)
            self._digest = exchanged.outer.digest(fragment).hex()
        self._after(header, reply)

    def _after(self, header: PartsHeader, reply: Message) -> None:
        """Test or save, as the hub asks for it at the end of a round."""
        trainer = self._trainer
        if header.test is not None:
            trainer.load_buffers(vectors_of(reply.parts[2], [*trainer.model.buffers()]))
            count, loss, score = trainer.test(*header.test)
            found = Tested(num_samples=count, loss=loss, score=score)
            self._ask(Topic.TESTED, encode(found), step=self._exchange)
        if header.save:
            assert trainer.round is not None
            current = trainer.round
            at = current.number, current.done
            if current.done == len(current.units):
                at = current.number + 1, 0
            tensors, values = trainer.state()
            whole = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
            self._ask(
                Topic.SAVED,
                encode(SavedHeader(round=at[0], step=at[1])),
                memoryview(bytes_of_tensors(whole)),
                memoryview(json_values.dumps("the state", values)),
                step=self._exchange,
            )

    def _ahead_s(self) -> float:
        """Measure the lead of this clock over the hub's, by the fastest of some round trips."""
        if boot_id() == self._spec.boot_id:
            return 0.0
        trips = []  # seconds of each, and the lead
        for _ in range(_NUM_PINGS):
            sent_s = time.monotonic()
            there_s = self._ask(Topic.CLOCK).step * 1e-9
            back_s = time.monotonic()
            trips.append((back_s - sent_s, (sent_s + back_s) / 2 - there_s))
        return min(trips)[1]

    def _ask(self, topic: Topic, *parts: memoryview, step: int = 0) -> Message:
        return check_reply(self._client.request(Message(topic.value, step, parts=parts)).result())


def setup_in(spec: RunSpec, worker: int, device: torch.device) -> TrainingSetup:
    """Return what a worker trains or rehearses; InvalidInput if model, data or workers misfit."""
    # In a balanced run workers take more inner steps or fewer, all of the same size.
    settings = spec.settings.model_copy(update={"balance": None})
    return setup_for(settings, group_of(spec, worker, device), spec.device)


def group_of(spec: RunSpec, worker: int, device: torch.device) -> Group:
    """Return the place of a worker among all, for what depends on it alone."""
    alone = Group.alone(device, spec.settings.deadline_s)
    return replace(alone, rank=worker, world_size=spec.config.workers)


def take_part(settings: WorkerProcessSettings, clients: Mapping[int, Client]) -> None:
    """Take part in the run of a hub as one worker, which is connected, until the run is over.

    Raises InvalidInput if it cannot take part, WorkerLost if the hub is gone too long.
    """
    if len(settings.numbers) != 1:
        raise InvalidInput(
            "workers",
            f"a process of strategy local is one worker, not {len(settings.numbers)}",
            hint="name its number, as --workers 1",
        )
    (number,) = settings.numbers
    device = first_device() if settings.device is None else device_named(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    spec = RunSpec.model_validate_json(clients[number].settings)
    if isinstance(spec.settings, RehearseSettings):
        device = torch.device("cpu")  # nothing is computed on any other
    with device_of(device).use():
        worker = LocalWorker(number, clients[number], spec, device)
        try:
            if spec.profiles:
                until_told(worker.profile)
            worker.run()
        finally:
            worker.close()


def main() -> None:
    """Work for the hub that the command line names."""
    run_as_process(take_part, WorkerProcessSettings)


if __name__ == "__main__":
    main()
