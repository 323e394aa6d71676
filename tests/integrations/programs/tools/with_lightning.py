"""Cases of Lightning's Trainer, which trains with Paceline and with DDP."""

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import FSDPPrecision
from torch import Tensor, nn

from paceline.integrations.lightning import PacelineStrategy
from pair import (
    NUM_RANKS,
    Counting,
    Net,
    batches,
    case,
    cases,
    distance,
    error_of,
    exchange_of,
    main,
    sgd,
)


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
    kind: type[Task] = Task, arguments: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train with exchange "host" and with DDP, and compare."""
    own, ddp = PacelineStrategy(exchange="host", **(arguments or {})), "ddp"
    if arguments:
        ddp = lightning.pytorch.strategies.DDPStrategy(**arguments)
    ours, theirs = fitted(own, kind, **options), fitted(ddp, kind, **options)
    return {"worst": distance(ours, theirs), **ours.noted}


cases(
    accumulated=lambda: beside_ddp(accumulate_grad_batches=2),
    by_hand=lambda: beside_ddp(ByHand, {"find_unused_parameters": True}),
    with_a_layer_left_out=lambda: beside_ddp(Odd, {"find_unused_parameters": True}),
    in_bfloat16=lambda: beside_ddp(precision="bf16-mixed"),
    clipped=lambda: beside_ddp(gradient_clip_val=0.1),
)


@case
def compiled() -> dict[str, Any]:
    tasks = [Task(), Task()]
    for strategy, task in zip((PacelineStrategy(exchange="host"), "ddp"), tasks, strict=True):
        trainer(strategy).fit(torch.compile(task, backend="aot_eager"), batches(), batches())
    return {"worst": distance(*tasks), **tasks[0].noted}


@case
def encoded() -> dict[str, Any]:
    own = PacelineStrategy(exchange="allreduce", codec="dynamic8")
    return {"apart": distance(fitted(own), fitted("ddp"))}


@case
def hook_on_cpus() -> dict[str, Any]:
    hook, wrapped = Counting(), []

    def wrapper(inner: object) -> object:
        wrapped.append(inner == hook.hook)
        return inner

    own = PacelineStrategy(exchange="allreduce", ddp_comm_hook=hook.hook, ddp_comm_wrapper=wrapper)
    return {"worst": distance(fitted(own), fitted("ddp")), "calls": hook.calls, "wraps": wrapped}


@case
def resumed_from_a_checkpoint() -> dict[str, Any]:
    whole, first, rest = fitted("paceline"), Task(), Task()
    kept = ModelCheckpoint("checkpoints", save_last=True, every_n_epochs=1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [kept]}
    trainer("paceline", max_epochs=1, **options).fit(first, batches(), batches())
    path = kept.last_model_path
    names = list(torch.load(path, weights_only=False)["state_dict"])
    trainer("paceline").fit(rest, batches(), batches(), ckpt_path=path)
    plain = Task.load_from_checkpoint(path)
    return {
        "worst": distance(rest, whole),
        "moved": distance(first, whole),
        "loaded": distance(plain, first),
        "prefixed": [name for name in names if not name.startswith("net.")],
    }


@case
def fitted_again() -> dict[str, Any]:
    """Train a module with two trainers; the first trainer must leave no state in it."""
    tasks = [Task(), Task()]
    for strategy, task in zip(("paceline", "ddp"), tasks, strict=True):
        for _ in range(2):
            one = trainer(strategy)
            one.fit(task, batches(), batches())
            one.validate(task, batches(), verbose=False)
        assert one.strategy.model is task
    left = [wrapper.statistics().exchange for wrapper in tasks[0].kept]
    return {"worst": distance(*tasks), **tasks[0].noted, "left": left}


@case
def refused() -> dict[str, Any]:
    def hook(*_: object) -> None: ...

    options: list[dict[str, Any]] = [
        {"exchange": "host", "ddp_comm_hook": hook},
        {"exchange": "tree", "ddp_comm_hook": hook},
        {"ddp_comm_wrapper": hook},
        {"exchange": "allreduce", "ddp_comm_state": object()},
        {"model_averaging_period": 4},
    ]
    errors = [error_of(lambda one=one: PacelineStrategy(**one)) for one in options]
    split = FSDPPrecision("bf16-mixed")
    errors += [error_of(lambda: fitted(PacelineStrategy(precision_plugin=split)))]
    errors += [error_of(lambda: fitted(PacelineStrategy(exchange="pigeon")))]
    return {"errors": errors}


main()
