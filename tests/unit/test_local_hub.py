"""The hub of strategy local with workers in threads: who is left out, who begins, who comes back.

Deadlines pass by a clock that the tests move.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from paceline.core.errors import WorkerLost
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.recipes.recipe import Recipe
from paceline.rpc.client import Client
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.limits import Identity
from paceline.rpc.server import Server
from paceline.rpc.workers import AGAIN, REFUSED, agreement, connected
from paceline.strategies.local import STRATEGY, run
from paceline.strategies.local import hub as hub_module
from paceline.strategies.local.config import Local
from paceline.strategies.local.hub import Hub
from paceline.strategies.local.protocol import PartHeader, RunSpec, Topic, encode, layout_of
from paceline.strategies.local.worker import setup_in, take_part
from refusals import refused
from rpc_exchange import DEADLINE_S, Clock, beside, until

WIDTH, BATCH_SIZE, STEPS_PER_EPOCH = 6, 24, 10
CPU = torch.device("cpu")


def data(num_samples: int, seed: int) -> TensorDataset:
    """Samples of a linear map, of which the first loss is some 200, and the least 0."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=source)
    return TensorDataset(inputs, 8 * inputs[:, :3] + 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def steady(optimizer: Any = torch.optim.AdamW, rate: float = 0.02, spoilt: float = 1.0) -> Recipe:
    inputs, targets = data(60, 1).tensors
    return Recipe(
        model=net,
        train=data(STEPS_PER_EPOCH * BATCH_SIZE, 0),
        test=TensorDataset(inputs * spoilt, targets),
        loss=mse_loss,
        optimizer=lambda parameters: optimizer(parameters, rate),
    )


def diverging() -> Recipe:
    return steady(torch.optim.SGD, 1e30)


def untestable() -> Recipe:
    """The loss on test samples that are NaN is, too, and all parameters are finite."""
    return steady(spoilt=torch.nan)


def honest(number: int, hub: Hub) -> None:
    """Be a worker, until the run is over."""
    settings = WorkerProcessSettings(
        connect=hub.rpc.address, run="local", workers=(number,), device="cpu"
    )
    with connected(settings, (number,), None) as clients:
        take_part(settings, clients)


def client_of(number: int, hub: Hub) -> Client:
    return Client(
        hub.rpc.address, Identity("local", agreement(), number), keys=None, deadline_s=DEADLINE_S
    )


def asked(client: Client, topic: Topic, *parts: Any, step: int = 0) -> Message:
    return client.request(Message(topic, step, parts=parts)).result()


def begun(client: Client, number: int) -> Message:
    spec = RunSpec.model_validate_json(client.settings)
    layout = layout_of(setup_in(spec, number, CPU), spec)
    return asked(client, Topic.BEGIN, memoryview(layout.encode()))


Other = Callable[[Hub], object]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Carry out a run, with these workers beside it; return its outcome and its clock."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def carry_out(
        *others: Other, recipe: str = "steady", clock: Clock | None = None, **more: Any
    ) -> Any:
        fields = {name: more.pop(name) for name in [*more] if name in Local.__annotations__}
        config = Local(**{"workers": 2, "sync_every": 4, "fragments": 2, **fields})
        settings = TrainSettings(
            model=f"{__name__}:{recipe}",
            strategy="local",
            workers=config.workers,
            batch_size=BATCH_SIZE,
            bind="tcp://127.0.0.1:0",
            run="local",
            profile_s=0,
            checkpoint_every="never",
            **({"epochs": 6} | more),
        )
        running: list[Future[object]] = []

        def made(**parts: Any) -> Hub:
            hub = Hub(**parts, clock=clock or time.monotonic)
            running.extend(beside(other, hub) for other in others)
            return hub

        monkeypatch.setattr(run, "Hub", made)
        # Heartbeats go on: it is the hub whose time passes.
        monkeypatch.setattr(hub_module, "Server", lambda *of, clock, **more: Server(*of, **more))
        alone = Group.alone(CPU, settings.deadline_s)
        session = TrainingSession(settings, STRATEGY, config, "local", alone, MagicMock())
        with run.start(session) as runner:
            runner.measure()
            outcome = runner.train(config)
        for one in running:
            one.result(DEADLINE_S)
        return outcome

    return carry_out


def workers(*numbers: int) -> list[Other]:
    return [lambda hub, number=number: honest(number, hub) for number in numbers]


@pytest.mark.parametrize("num_steps", [41, 42, 43])
def test_a_last_round_may_be_shorter_than_the_delay(trained, num_steps: int):
    delay = {"delay": 1, "mixing": 0.5, "workers": 3}
    outcome = trained(*workers(0, 1, 2), **delay, steps=num_steps)
    assert len(outcome.epochs) == 5
    assert not outcome.lost


def test_a_worker_that_sends_nothing_is_left_out_and_comes_back(trained):
    clock = Clock()

    def late(hub: Hub) -> None:
        with closing(client_of(1, hub)) as client:
            begun(client, 1)
            until(lambda: hub.relay.first_part_s)
            clock.now_s += 59
            until(lambda: hub._polled_s == clock.now_s)
            assert not hub.lost
            clock.now_s += 100
            until(lambda: hub.lost)
            part = encode(PartHeader(weight=1, num_steps=1, is_finite=False))
            assert asked(client, Topic.PART, part, b"").topic == AGAIN
        honest(1, hub)

    outcome = trained(*workers(0), late, clock=clock, deadline_s=60)
    assert [one.split(" for ")[0] for one in outcome.lost] == ["worker 1 has sent nothing"]
    assert len(outcome.epochs) == 6


def test_those_who_come_in_time_begin_without_the_others(trained):
    clock = Clock()

    def passing(hub: Hub) -> None:
        until(lambda: hub._waiting)
        clock.now_s += 61

    outcome = trained(*workers(0), passing, clock=clock, wait_s=60)
    assert len(outcome.epochs) == 6


@pytest.mark.parametrize("comes", [False, True])
def test_a_hub_without_workers_gives_up_after_the_wait(trained, comes: bool):
    """Whether nobody has come at all, or the only worker has left."""
    clock = Clock()

    def leaving(hub: Hub) -> None:
        if comes:
            with closing(client_of(0, hub)) as client:
                begun(client, 0)
        clock.tick_s = 0.5

    with pytest.raises(WorkerLost):
        trained(leaving, clock=clock, wait_s=60, workers=1)
    assert clock.now_s > 1060


def test_a_worker_of_another_run_is_refused_and_another_takes_its_place(trained):
    def wrong(hub: Hub) -> None:
        with closing(client_of(1, hub)) as client:
            for layout in (b"{}", b"[", b'{"settings": {"kind": "train"}}'):
                assert asked(client, Topic.BEGIN, layout).topic == REFUSED
            assert asked(client, Topic.UNITS).topic == REFUSED  # which a hub alone says
        honest(1, hub)

    outcome = trained(*workers(0), wrong)
    assert not outcome.lost


def test_a_worker_that_differs_is_left_out_and_takes_the_groups(trained):
    """Its parameters are NaN, or its copy of the group's has other bits."""

    def different(hub: Hub) -> None:
        with closing(client_of(1, hub)) as client:
            begun(client, 1)
            asked(client, Topic.ROUND)
            nan = PartHeader(weight=1, num_steps=1, is_finite=False)
            assert asked(client, Topic.PART, encode(nan), b"").topic == AGAIN
            until(lambda: hub.rounds.exchange > 0)  # of no exchange before it are bits compared
            begun(client, 1)
            exchange = hub.rounds.exchange
            other = PartHeader(weight=1, num_steps=1, digest="0" * 8, num_buffers=0)
            asked(client, Topic.ROUND, step=exchange // 2)
            told = asked(client, Topic.PART, encode(other), b"", step=exchange)
            assert told.topic == AGAIN
        honest(1, hub)

    outcome = trained(*workers(0), different, epochs=12)
    assert outcome.lost[0] == "worker 1 has parameters that are NaN or infinite"
    assert "other bits" in outcome.lost[1]
    assert outcome.epochs[-1].train_loss < outcome.epochs[0].train_loss / 2


@pytest.mark.parametrize("recipe", ["diverging", "untestable"])
def test_all_that_is_not_finite_ends_the_run(trained, recipe: str):
    def ends(number: int) -> Other:
        def worker(hub: Hub) -> None:
            with refused("learning_rate"):
                honest(number, hub)

        return worker

    with refused("learning_rate"):
        trained(ends(0), ends(1), recipe=recipe)


def test_what_a_worker_says_before_it_fails_is_the_reason(trained):
    clock = Clock()

    def failing(hub: Hub) -> None:
        with closing(client_of(0, hub)) as client:
            begun(client, 0)
            asked(client, Topic.FAILED, b"RuntimeError: bang")
        clock.tick_s = 0.5

    with pytest.raises(WorkerLost, match="RuntimeError: bang"):
        trained(failing, clock=clock, workers=1, wait_s=60)


@pytest.mark.parametrize(
    ("field", "options"), [("sync_every", {"sync_every": 61}), ("fragments", {"fragments": 4})]
)
def test_settings_that_do_not_fit_the_run_are_refused(trained, field: str, options: dict[str, int]):
    """Of 60 steps, with a model of three layers and two workers."""
    with refused(field):
        trained(**options)
