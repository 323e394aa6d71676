"""LocalUpdates in Lightning, Transformers, Fabric and Accelerate equals naive averaging."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import paceline
from rounds import Loop, averaged, vector

MISSING = [name for name in ("lightning", "transformers", "accelerate") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"without {MISSING}"),
    pytest.mark.timeout(300),
]
NUM_STEPS, SYNC_EVERY = 10, 4
Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """A network with buffers, which DDP broadcasts; `seen` collects its training batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.seen: Batches = []

    def forward(self, inputs: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        if self.training:
            self.seen.append((inputs.clone(), labels.clone()))
        return {"loss": mse_loss(self.layers(inputs), labels)}


def samples() -> TensorDataset:
    inputs = torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02, momentum)


def naive(seen: list[Batches], sync_every: list[int], per_step: int = 1) -> Tensor:
    """Train two workers on their recorded batches, and average the models after each round.

    `sync_every`: each worker's steps per round. `per_step`: micro-batches per step.
    """

    def loop(batches: Batches) -> Loop:
        model = Net()
        optimizer = sgd(model)

        def step(number: int) -> None:
            for batch in batches[number * per_step : (number + 1) * per_step]:
                (model(*batch)["loss"] / per_step).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, [optimizer], step

    num_steps = [len(batches) // per_step for batches in seen]
    return averaged([loop(batches) for batches in seen], num_steps, sync_every)


def check(found: list[Any], sync_every: list[int], per_step: int = 1) -> None:
    (first, seen_by_first), (second, seen_by_second) = found
    assert torch.equal(first, second)
    seen = [list(seen_by_first), list(seen_by_second)]
    assert not torch.equal(seen[0][0][0], seen[1][0][0])
    torch.testing.assert_close(first, naive(seen, sync_every, per_step))


# --- Lightning ---------------------------------------------------------------------------------


def fitted(
    num_steps: int,
    by_hand: bool = False,
    momentum: float = 0.9,
    per_step: int = 1,
    strategy: str = "ddp",
    folder: str = "",
    ckpt_path: str | None = None,
    repeats: int = 1,
    **options: Any,
) -> tuple[Tensor, Batches]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from paceline.integrations.lightning import LocalUpdatesCallback

    class Task(lightning.LightningModule):
        automatic_optimization = not by_hand

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor | None:
            loss = self.net(*batch)["loss"]
            if not by_hand:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self, momentum)

    callbacks: list[Any] = [LocalUpdatesCallback(**options)]
    if folder:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_epochs=1))
    task = Task()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=num_steps,
        use_distributed_sampler=False,
        accumulate_grad_batches=per_step,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own = Subset(samples(), [*range(dist.get_rank(), 80 // repeats, 2)] * repeats)
    trainer.fit(task, DataLoader(own, batch_size=4), ckpt_path=ckpt_path)
    return vector(task), task.net.seen


def with_lightning_resumed(folder: str) -> list[Tensor]:
    """Train for two epochs of ten steps; train the second again from the first's checkpoint."""
    options: dict[str, Any] = {"num_steps": 20, "momentum": 0.0, "sync_every": 5}
    options["repeats"] = 10  # of one batch, as a resumed Lightning starts with the first
    whole, _ = fitted(folder=folder, **options)
    rest, _ = fitted(ckpt_path=f"{folder}/step=10.ckpt", **options)
    return [whole, rest]


# --- Transformers ------------------------------------------------------------------------------


def trainer_trained(
    num_steps: int,
    momentum: float = 0.9,
    folder: str = "runs",
    resume: bool = False,
    **options: Any,
) -> tuple[Tensor, Batches]:
    from accelerate.state import AcceleratorState
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import Trainer, TrainingArguments

    from paceline.integrations.transformers import LocalUpdatesCallback

    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=num_steps,
        per_device_train_batch_size=4,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="steps" if folder != "runs" else "no",
        save_steps=10,
        report_to="none",
        disable_tqdm=True,
    )
    model = Net()
    optimizer = sgd(model, momentum)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"inputs": one, "labels": two} for one, two in samples()],
        callbacks=[LocalUpdatesCallback(**options)],
        optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-10" if resume else None)
    assert arguments.average_tokens_across_devices
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return vector(model), model.seen


def by_tool(
    tool: str, num_steps: list[int], sync_every: list[int], options: dict[str, Any]
) -> tuple[Tensor, Batches]:
    """Train with this rank's number of steps, and of steps per round."""
    rank, train = dist.get_rank(), {"lightning": fitted, "transformers": trainer_trained}[tool]
    return train(num_steps[rank], sync_every=sync_every[rank], outer="average", **options)


EACH = ([NUM_STEPS] * 2, [SYNC_EVERY] * 2)
FEWER = ([2, 8], [1, 4])  # steps of the first worker


@pytest.mark.parametrize(
    ("tool", "num_steps", "sync_every", "options"),
    [
        *(("lightning", *EACH, {"by_hand": by_hand, "strategy": name})
          for by_hand in (False, True) for name in ("ddp", "paceline")),
        ("lightning", [5, 5], [2, 2], {"per_step": 2}),
        *((tool, *FEWER, {}) for tool in ("lightning", "transformers")),
        ("transformers", *EACH, {}),
    ],
)  # fmt: skip
def test_a_trainer_averages_models_instead_of_gradients(
    pair: Any, tmp_path: Path, tool: str, num_steps: list[int], sync_every: list[int], options: Any
) -> None:
    found = pair(by_tool, tool, num_steps, sync_every, options, cwd=tmp_path)
    check(found, sync_every, options.get("per_step", 1))


def with_trainer_resumed(folder: str) -> list[Tensor]:
    """Train for two epochs of ten steps; train the second again from the first's checkpoint."""
    options: dict[str, Any] = {"num_steps": 20, "momentum": 0.0, "sync_every": 5, "folder": folder}
    whole, _ = trainer_trained(**options)
    rest, _ = trainer_trained(resume=True, **options)
    return [whole, rest]


def with_trainer_saved(folder: str) -> list[Tensor]:
    """Train with unequal rounds; return the parameters in memory and in the last checkpoint."""
    rank = dist.get_rank()
    end, _ = trainer_trained(10, folder=f"{folder}/{rank}", sync_every=[5, 2][rank])
    saved = Net()
    saved.load_state_dict(load_file(f"{folder}/0/checkpoint-10/model.safetensors"))
    return [end, vector(saved)]


@pytest.mark.parametrize(
    "ended", [with_lightning_resumed, with_trainer_resumed, with_trainer_saved]
)
def test_a_resumed_run_restores_outer_momentum_and_the_last_checkpoint_is_final(
    pair: Any, tmp_path: Path, ended: Any
) -> None:
    found = [one for ends in pair(ended, str(tmp_path)) for one in ends]
    assert all(torch.equal(one, found[0]) for one in found)


# --- Fabric ------------------------------------------------------------------------------------


def with_fabric() -> tuple[Tensor, Batches]:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net))
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4))
    with paceline.LocalUpdates(model, optimizer, SYNC_EVERY, outer="average"):
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(model(inputs, labels)["loss"])
            optimizer.step()
    return vector(net), net.seen


def test_fabric_averages_models_instead_of_gradients(pair: Any) -> None:
    check(pair(with_fabric), [SYNC_EVERY] * 2)


# --- Accelerate --------------------------------------------------------------------------------


def with_accelerate(per_step: int) -> tuple[Tensor, Batches]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=per_step)
    net = Net()
    data = DataLoader(samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(net, sgd(net), data)
    assert isinstance(model, DistributedDataParallel)
    with paceline.LocalUpdates(model, optimizer, SYNC_EVERY, outer="average") as updates:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs, labels)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    assert updates.num_steps == NUM_STEPS // per_step
    return vector(net), net.seen


@pytest.mark.parametrize("per_step", [1, 2])
def test_accelerate_averages_models_instead_of_gradients(pair: Any, per_step: int) -> None:
    check(pair(with_accelerate, per_step), [SYNC_EVERY] * 2, per_step)


def with_accelerates_scaler() -> int:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    net = Net()
    optimizer = AcceleratedOptimizer(sgd(net), scaler=torch.amp.GradScaler("cpu"))
    with paceline.LocalUpdates(net, optimizer, SYNC_EVERY) as updates:
        for number in range(NUM_STEPS):
            loss = net(*samples()[:4])["loss"] * (float("inf") if number == 5 else 1.0)
            optimizer.scaler.scale(loss).backward()
            optimizer.step()
            assert optimizer.step_was_skipped == (number == 5)
            optimizer.zero_grad()
    return updates.num_steps


def test_a_step_skipped_by_accelerates_scaler_is_no_inner_step(pair: Any) -> None:
    assert pair(with_accelerates_scaler) == [NUM_STEPS - 1] * 2
