"""Cases of a process that is alone: each tool trains as a plain loop does."""

from typing import Any

import lightning
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from paceline.integrations import accelerate, transformers
from paceline.integrations.fabric import PacelineStrategy as OfFabric
from paceline.integrations.lightning import PacelineStrategy as OfLightning
from pair import Net, batches, case, distance, main, sgd, wraps


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    optimizer = optimizer or sgd(model)
    for batch in batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def beside_a_loop(net: nn.Module, wrapped: nn.Module) -> dict[str, Any]:
    return {"worst": distance(net, trained(Net())), "wraps": wraps(wrapped)}


@case
def with_accelerate() -> dict[str, Any]:
    accelerator = accelerate.with_paceline(Accelerator(cpu=True), exchange="host")
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net))
    return beside_a_loop(net, trained(model, optimizer))


class Fitting(nn.Module):
    """A network as a Trainer wants it: it returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, [inputs, labels])}


@case
def with_transformers() -> dict[str, Any]:
    model = Fitting()
    rows = [
        {"inputs": inputs, "labels": targets}
        for batch in batches()
        for inputs, targets in zip(*batch, strict=True)
    ]
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(
        "runs",
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        **quiet,
    )
    optimizers = (sgd(model), None)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=optimizers)
    trainer = transformers.with_paceline(trainer, exchange="host")
    trainer.train()
    return beside_a_loop(model.net, trainer.model_wrapped)


@case
def with_fabric() -> dict[str, Any]:
    fabric = Fabric(strategy=OfFabric(exchange="host"), accelerator="cpu", devices=1)
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net))
    trained(model, optimizer)
    return beside_a_loop(net, model._forward_module)


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


@case
def with_lightning() -> dict[str, Any]:
    task = Task()
    left_out = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options: dict[str, Any] = dict.fromkeys([*left_out, "use_distributed_sampler"], False)
    options |= {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    trainer = lightning.Trainer(strategy=OfLightning(exchange="host"), **options)
    trainer.fit(task, batches())
    return beside_a_loop(task.net, trainer.strategy.model)


main()
