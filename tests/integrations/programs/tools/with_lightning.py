"""Cases of Lightning's Trainer, which trains with Paceline and with DDP."""

from functools import partial
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import FSDPPrecision
from tool_cases import (
    MOVED,
    NUM_RANKS,
    ROUNDING,
    Net,
    batches,
    check_exchange,
    distance,
    exchange_of,
    sgd,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.integrations.lightning import PacelineStrategy
from refusals import refused as refuses


class Task(lightning.LightningModule):
    """A network with a loss that records its wrapper after training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.noted: dict[str, Any] = {}
        self.kept: list[nn.Module] = []  # a list, so that its modules do not become submodules

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs) - targets).square().mean()

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        inputs, targets = batch
        self.log("error", (self.net(inputs) - targets).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)

    def on_train_end(self) -> None:
        model = self.trainer.strategy.model
        self.kept.append(model)
        self.noted = exchange_of(model)


class ByHand(Task):
    """Computes two losses, each with its own backward pass and optimizer."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], _: int) -> None:
        inputs, targets = batch
        losses = [(self.net(inputs, odd) - targets).square().mean() for odd in (False, True)]
        for loss in losses:
            self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        body = nn.ModuleList([self.net.first, self.net.norm, self.net.last])
        return [sgd(body), sgd(self.net.odd)]


class Odd(Task):
    """Skips a layer in every other step."""

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs, odd=number % 2 == 1) - targets).square().mean()


def trainer(strategy: object, **options: Any) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    return lightning.Trainer(strategy=strategy, accelerator="cpu", devices=NUM_RANKS, **options)


def fitted(strategy: object, kind: type[Task] = Task, **options: Any) -> Task:
    task = kind()
    trainer(strategy, **options).fit(task, batches(), batches())
    return task


def beside_ddp(
    num_exchanges: int,
    kind: type[Task] = Task,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train with exchange "host" and with DDP, and compare."""
    own, ddp = PacelineStrategy(exchange="host", **(arguments or {})), "ddp"
    if arguments:
        ddp = lightning.pytorch.strategies.DDPStrategy(**arguments)
    ours, theirs = fitted(own, kind, **options), fitted(ddp, kind, **options)
    assert distance(ours, theirs) <= ROUNDING
    check_exchange(ours.noted, num_exchanges)


UNUSED = {"find_unused_parameters": True}
accumulated = partial(beside_ddp, 4, accumulate_grad_batches=2)
by_hand = partial(beside_ddp, 16, ByHand, UNUSED)  # two losses per step
with_a_layer_left_out = partial(beside_ddp, 8, Odd, UNUSED)
in_bfloat16 = partial(beside_ddp, 8, precision="bf16-mixed")
clipped = partial(beside_ddp, 8, gradient_clip_val=0.1)


def compiled() -> None:
    tasks = [Task(), Task()]
    for strategy, task in zip((PacelineStrategy(exchange="host"), "ddp"), tasks, strict=True):
        trainer(strategy).fit(torch.compile(task, backend="aot_eager"), batches(), batches())
    assert distance(*tasks) <= ROUNDING
    check_exchange(tasks[0].noted, 8)


def hook_on_cpus() -> None:
    """DDPStrategy ignores the hook on CPUs."""
    calls, wrapped = [], []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        return allreduce_hook(None, bucket)

    def wrapper(inner: object) -> object:
        wrapped.append(inner is hook)
        return inner

    own = PacelineStrategy(exchange="allreduce", ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)
    assert distance(fitted(own), fitted("ddp")) <= ROUNDING
    assert (calls, wrapped) == ([0] * 8, [True])


def resumed_from_a_checkpoint() -> None:
    whole, first, rest = fitted("paceline"), Task(), Task()
    kept = ModelCheckpoint("checkpoints", save_last=True, every_n_epochs=1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [kept]}
    trainer("paceline", max_epochs=1, **options).fit(first, batches(), batches())
    path = kept.last_model_path
    names = list(torch.load(path, weights_only=False)["state_dict"])
    trainer("paceline").fit(rest, batches(), batches(), ckpt_path=path)
    plain = Task.load_from_checkpoint(path)
    assert all(name.startswith("net.") for name in names)
    assert distance(first, whole) >= MOVED
    assert max(distance(rest, whole), distance(plain, first)) <= ROUNDING


def fitted_again() -> None:
    """Train a module with two trainers, which must leave no state, threads or memory in it."""
    tasks = [Task(), Task()]
    for strategy, task in zip(("paceline", "ddp"), tasks, strict=True):
        for _ in range(2):
            one = trainer(strategy)
            one.fit(task, batches(), batches())
            one.validate(task, batches(), verbose=False)
        assert one.strategy.model is task
    assert [wrapper.statistics().exchange for wrapper in tasks[0].kept] == ["none", "none"]
    assert distance(*tasks) <= ROUNDING
    assert tasks[0].noted["wraps"] == ["DataParallel"]


def refused() -> None:
    def hook(*_: object) -> None: ...

    options: list[dict[str, Any]] = [
        {"exchange": "host", "ddp_comm_hook": hook},
        {"exchange": "tree", "ddp_comm_hook": hook},
        {"ddp_comm_wrapper": hook},
        {"exchange": "allreduce", "ddp_comm_state": object()},
    ]
    for one in options:
        with refuses("ddp_comm_hook"):
            PacelineStrategy(**one)
    with refuses("model_averaging_period"):
        PacelineStrategy(model_averaging_period=4)
    with refuses("precision"):
        fitted(PacelineStrategy(precision_plugin=FSDPPrecision("bf16-mixed")))
    with refuses("exchange"):
        fitted(PacelineStrategy(exchange="pigeon"))
