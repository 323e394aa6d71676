"""Models whose head is split among ranks, and their oracles in one process."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.exchange.step import OF_CLASSES, Learning, Share
from paceline.links.clock import Clock
from paceline.links.rendezvous import joined
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.evaluation import evaluate
from paceline.strategies.subbatch.layers import dropout_seed
from paceline.strategies.subbatch.state import save
from paceline.strategies.subbatch.trainer import SplitTrainer
from paceline.training.data.dataset import TensorSamples
from paceline.training.models import describe
from paceline.training.recipes.losses import next_token_loss

SEED, IGNORED = 3, -100
Batch = tuple[Any, Tensor, list[int]]  # inputs, targets, number of samples of each rank


class Split:
    """This rank's part of a model and its trainer; by default in float64.

    `example(num_ranks)` returns inputs with the largest number of samples of a rank.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        example: Callable[[int], Any],
        batch: Callable[[int, int], Batch],
        make: Callable[..., torch.optim.Optimizer],
        *,
        is_float64: bool = True,
        learning: Learning = OF_CLASSES,
        schedule: Callable[..., Any] = lambda optimizer: None,
        **config: Any,
    ) -> None:
        torch.set_default_dtype(torch.float64 if is_float64 else torch.float32)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = joined(torch.device("cpu"), 20.0)
        self.build, self.batch, self.make = build, batch, make
        self.learning, self.schedule = learning, schedule
        self.config = SubBatch(workers=self.size, **config)
        inputs = example(self.size)
        workload = describe(build(), inputs, "net")
        self.model = split(build, workload, self.config, self.group, SEED, inputs)
        recorder = Recorder(Clock(), f"cpu{self.rank}", self.rank)
        self.trainer = SplitTrainer(
            *(self.model, self.config, self.group, recorder),
            lambda module: make(module.parameters()),
            SEED,
            learning=learning,
            schedule=schedule,
        )

    def shares(self) -> Iterator[Share]:
        for step in itertools.count():
            inputs, targets, counts = self.batch(step, self.size)
            inputs, targets = tree_map(
                lambda whole, of=counts: whole.split(of)[self.rank], (inputs, targets)
            )
            yield Share(inputs, targets, 1.0)

    def losses(self, num_steps: int) -> list[float]:
        """Train `num_steps` steps, and return their losses."""
        source = self.shares()
        return [float(self.trainer.step(source)) for _ in range(num_steps)]

    def whole(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.build()

    def compare(self, oracle: nn.Module) -> None:
        """Save the model, compare it on rank 0 with the oracle, and close the trainer."""
        path = Path("model.safetensors")
        save(path, self.model.module, self.model.shardings, self.group)
        if self.rank == 0:
            found = self.build()
            load_model(found, str(path))
            for one, other in zip(
                found.state_dict().values(), oracle.state_dict().values(), strict=True
            ):
                assert float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)) < 1e-12
        self.trainer.close()

    def check_tests(self, oracle: nn.Module, data: TensorSamples, *scores: Any) -> None:
        """Compare the loss and scores, summed over all ranks, with the oracle."""
        with torch.no_grad():
            logits = oracle.eval()(data.inputs)
        for score in scores:
            found = self.group.gather(list(evaluate(self.trainer, data, score)))
            loss, value = (sum(column) / len(data) for column in zip(*found, strict=True))
            assert abs(loss / float(next_token_loss(logits, data.targets)) - 1) < 1e-11
            assert abs(value / float(score(logits, data.targets)) - 1) < 1e-11


def _seeded(model: nn.Module) -> list[int]:
    """Seed plain dropouts like a run's; return a list whose entry the caller sets to the step."""
    step = [0]

    def seeds(name: str) -> Callable[..., None]:
        def seed(*_: object) -> None:
            torch.manual_seed(dropout_seed(SEED, step[0], name))

        return seed

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(seeds(name))
    return step


def trained_together(own: Split, num_steps: int) -> nn.Module:
    """Train beside an oracle with the whole batch in one process, and return the oracle."""
    oracle, source = own.whole(), own.shares()
    optimizer, step = own.make(oracle.parameters()), _seeded(oracle)
    schedule = own.schedule(optimizer)
    for step[0] in range(num_steps):
        loss = float(own.trainer.step(source))
        inputs, targets, _ = own.batch(step[0], own.size)
        optimizer.zero_grad()
        outputs = oracle(**inputs) if isinstance(inputs, dict) else oracle(inputs)
        expected = next_token_loss(outputs, targets)
        expected.backward()
        if own.learning.clip_norm is not None:
            nn.utils.clip_grad_norm_(oracle.parameters(), own.learning.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        assert abs(loss / expected.item() - 1) < 1e-12
    return oracle


def compare_by_passes(own: Split, num_passes: int, num_steps: int) -> None:
    """Compare training with an oracle that computes sub-batches in sequence in one process.

    Each rank contributes a part of its samples to each sub-batch, the larger parts first.
    """
    oracle, source, each = own.whole(), own.shares(), own.config.updates == "sub-batch"
    head = oracle.head
    of_body = [one for name, one in oracle.named_parameters() if not name.startswith("head")]
    optimizers = own.make(of_body), own.make(head.parameters())
    for step in range(num_steps):
        own.trainer.step(source)
        inputs, targets, counts = own.batch(step, own.size)
        oracle.head = nn.Identity()
        activations, oracle.head = oracle(inputs), head
        errors, num_counted = torch.zeros_like(activations), (targets != IGNORED).sum()
        samples = torch.arange(len(targets)).split(counts)
        for parts in zip(*(one.tensor_split(num_passes) for one in samples), strict=True):
            rows = torch.cat(parts)
            share = (targets[rows] != IGNORED).sum() / num_counted
            if not share:
                continue
            values = activations[rows].detach().requires_grad_()
            loss = next_token_loss(head(values), targets[rows])
            (loss if each else loss * share).backward()
            errors[rows] = values.grad * share if each else values.grad
            if each:
                optimizers[1].step()
                optimizers[1].zero_grad()
        activations.backward(errors)
        for optimizer in optimizers[: 1 if each else 2]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    own.compare(oracle)
