"""A language model whose head is split by its vocabulary, against one process."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from language_nets import IGNORED, MOST, Language, count_of, samples
from paceline.data.dataset import TensorSamples
from paceline.exchange.step import Learning, Share
from paceline.links.rendezvous import joined
from paceline.models import describe
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.record.clock import HostClock
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.evaluation import evaluate
from paceline.strategies.subbatch.recorder import HeadRecorder
from paceline.strategies.subbatch.state import save
from paceline.strategies.subbatch.trainer import SplitTrainer
from pair import Ranks

slow = pytest.mark.slow
SEED, NUM_STEPS, HEADER = 3, 8, 40
# The gradients of attention's key biases are zero but for rounding, which a small eps would raise.
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-6)
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def scheduled(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, NUM_STEPS)


class Training:
    """This rank's part of a training, and its batches; in float64 unless told."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], *, is_float64: bool = True, **more: Any
    ) -> None:
        torch.set_default_dtype(torch.float64 if is_float64 else torch.float32)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = joined(torch.device("cpu"), 20.0)
        self.build = more.pop("build", Language)
        learning = Learning(next_token_loss, **more.pop("learning", {}))
        schedule = more.pop("schedule", lambda optimizer: None)
        self.is_masked = more.pop("is_masked", False)
        self.config = SubBatch(workers=self.size, **more)
        tokens, mask, _ = samples(0, -(-MOST // self.size))
        inputs = {"tokens": tokens, "mask": mask} if self.is_masked else tokens
        self.workload = describe(self.build(), inputs, "language")
        self.model = split(self.build, self.workload, self.config, self.group, SEED, inputs)
        self.recorder = HeadRecorder(HostClock(), f"cpu{self.rank}", self.rank)
        self.trainer = SplitTrainer(
            *(self.model, self.config, self.group, self.recorder),
            lambda module: make(module.parameters()),
            learning=learning,
            schedule=schedule,
        )

    def shares(self, first: int = 0, count: Callable[[int], int] = count_of) -> Iterator[Share]:
        for step in itertools.count(first):
            tokens, mask, targets = (
                part.tensor_split(self.size)[self.rank] for part in samples(step, count(step))
            )
            inputs = {"mask": mask, "tokens": tokens} if self.is_masked else tokens
            yield Share(inputs, targets, 1.0)

    def compare(self, oracle: nn.Module) -> None:
        """Compare with a whole model: rank 0 does."""
        path = Path("model.safetensors")
        save(path, self.model.module, self.model.shardings, self.group)
        if self.rank == 0:
            found = self.build()
            load_model(found, str(path))
            for one, other in zip(found.parameters(), oracle.parameters(), strict=True):
                assert float((one - other).abs().max()) < 1e-12


CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (ADAMW, {}),
    "sgd": (SGD, {}),
    "clipped": (SGD, {"learning": {"clip_norm": 0.05}, "schedule": scheduled}),
    "masked": (ADAMW, {"is_masked": True, "build": partial(Language, bias=True)}),
}


def equal(case: str) -> None:
    """As one process with the whole batch: parameters, losses of steps, tests."""
    make, more = CASES[case]
    training = Training(make, **more)
    torch.manual_seed(SEED)
    oracle = training.build()
    optimizer = make(oracle.parameters())
    of_oracle = more["schedule"](optimizer) if "schedule" in more else None
    source = training.shares()
    for step in range(NUM_STEPS):
        loss = float(training.trainer.step(source))
        tokens, mask, targets = samples(step, count_of(step))
        outputs = oracle(tokens, mask) if training.is_masked else oracle(tokens)
        expected = next_token_loss(outputs, targets)
        optimizer.zero_grad()
        expected.backward()
        if "learning" in more:
            nn.utils.clip_grad_norm_(oracle.parameters(), more["learning"]["clip_norm"])
        optimizer.step()
        if of_oracle:
            of_oracle.step()
        assert abs(loss - expected.item()) < 1e-13
    training.compare(oracle)
    if not training.is_masked:
        check_tests(training, oracle)
    training.trainer.close()


def largest(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A score that needs the logits, and is alike for each sample."""
    return outputs.amax((1, 2)).mean()


def check_tests(training: Training, oracle: nn.Module) -> None:
    """Sums over all ranks: the loss, a score of parts, and one that needs the logits."""
    tokens, _, targets = samples(99, 11)
    data = TensorSamples(tokens, targets)
    with torch.no_grad():
        logits = oracle(tokens)
    for score in (bits_per_byte, largest):
        found = training.group.gather(list(evaluate(training.trainer, data, score)))
        loss, value = (sum(column) / len(data) for column in zip(*found, strict=True))
        assert abs(loss - float(next_token_loss(logits, targets))) < 1e-13
        assert abs(value - float(score(logits, targets))) < 1e-13


def each_sub_batch() -> None:
    """The head is updated with the mean loss of each sub-batch, the body once a step."""
    training = Training(SGD, updates="sub-batch")
    size = training.size
    torch.manual_seed(SEED)
    oracle = training.build()
    head = SGD(oracle.head.parameters())
    body = SGD([one for name, one in oracle.named_parameters() if not name.startswith("head")])
    source = training.shares()
    for step in range(4):
        training.trainer.step(source)
        tokens, _, targets = samples(step, count_of(step))
        kept = list[torch.Tensor]()
        hook = oracle.head.register_forward_pre_hook(
            lambda _, args, kept=kept: kept.append(args[0])
        )
        oracle(tokens)
        hook.remove()
        [activations] = kept
        places = torch.arange(len(tokens)).tensor_split(size)
        errors, whole = torch.zeros_like(activations), (targets != IGNORED).sum()
        for number in range(min(size, -(-MOST // size))):
            rows = torch.cat([one.tensor_split(size)[number] for one in places])
            own = activations[rows].detach().requires_grad_()
            counted = (targets[rows] != IGNORED).sum()
            if not counted:
                continue
            loss = next_token_loss(oracle.head(own), targets[rows])
            loss.backward()
            errors[rows] = own.grad * counted / whole
            head.step()
            head.zero_grad()
        activations.backward(errors)
        body.step()
        body.zero_grad()
    training.compare(oracle)
    training.trainer.close()


@pytest.mark.parametrize("place", ["pair", pytest.param("triple", marks=slow)])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process_with_the_whole_batch(request, tmp_path, case, place):
    """Targets of -100 lie unevenly: some ranks and some sub-batches have hardly any others."""
    request.getfixturevalue(place)(equal, case, cwd=tmp_path)


@slow
def test_updates_per_sub_batch_are_by_the_mean_over_its_own_tokens(pair, triple, tmp_path):
    for ranks in (pair, triple):
        ranks(each_sub_batch, cwd=tmp_path)


def losses_of(make: Callable[..., Any], num_steps: int, **more: Any) -> list[float]:
    training = Training(make, is_float64=False, **more)
    source = training.shares()
    losses = [float(training.trainer.step(source)) for _ in range(num_steps)]
    training.trainer.close()
    return losses


def bfloat16() -> None:
    """As one process under autocast: losses, and the types of what is kept."""
    make = partial(torch.optim.AdamW, lr=0.01)
    training = Training(make, is_float64=False, learning={"bfloat16": True})
    types = set()
    linear = nn.functional.linear

    def spied(*args: Any) -> torch.Tensor:
        outputs = linear(*args)
        types.add(outputs.dtype)
        return outputs

    torch.manual_seed(SEED)
    oracle = training.build()
    optimizer = make(oracle.parameters())
    source, ours = training.shares(), []
    for step in range(NUM_STEPS):
        nn.functional.linear = spied
        ours.append(float(training.trainer.step(source)))
        nn.functional.linear = linear
        tokens, _, targets = samples(step, count_of(step))
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(oracle(tokens).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(ours[-1] - float(loss)) < 5e-3
    assert types == {torch.bfloat16}
    assert {one.dtype for one in training.model.module.parameters()} == {torch.float32}
    training.trainer.close()
    codecs = dict.fromkeys(("activations", "activation_gradients"), "bfloat16")
    # What travels is rounded already.
    assert losses_of(make, NUM_STEPS, learning={"bfloat16": True}, **codecs) == ours


def test_bfloat16_is_that_of_autocast(pair: Ranks):
    pair(bfloat16)


WAYS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "step": (ADAMW, {}),
    "each": (SGD, {"updates": "sub-batch"}),
    "onebit": (SGD, {"gradients": "onebit"}),
}


def left(way: str) -> dict[str, Any]:
    """Five steps, after which the state is written down; and five more."""
    make, more = WAYS[way]
    training = Training(make, is_float64=False, schedule=scheduled, **more)
    source = training.shares(count=lambda step: 6)
    for _ in range(5):
        training.trainer.step(source)
    state = training.trainer.gather_state()
    if state is not None:
        torch.save(state, "state.pt")
    torch.save(training.trainer.gradients.state(), f"feedback{training.rank}.pt")
    return ended(training, [float(training.trainer.step(source)) for _ in range(5)])


def went_on(way: str) -> dict[str, Any]:
    """Another training with the state that was written down."""
    make, more = WAYS[way]
    training = Training(make, is_float64=False, schedule=scheduled, **more)
    source = training.shares(5, count=lambda step: 6)
    next(training.shares())  # a step of another run's batches changes nothing
    training.trainer.load_state(torch.load("state.pt", weights_only=False))
    if training.size == 2:
        feedback = torch.load(f"feedback{training.rank}.pt")
        training.trainer.gradients.load_state(feedback)
    return ended(training, [float(training.trainer.step(source)) for _ in range(5)])


def ended(training: Training, losses: list[float]) -> dict[str, Any]:
    state = training.trainer.gather_state()
    training.trainer.close()
    if state is None:
        return {}
    tensors = dict(state.tensors)
    for name, optimizer in state.optimizers.items():
        for number, values in optimizer["state"].items():
            tensors |= {f"{name}/{number}/{key}": torch.as_tensor(v) for key, v in values.items()}
    numbers = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
    return {"tensors": numbers, "losses": losses, "steps": state.num_steps}


@pytest.mark.parametrize("way", ["step", "onebit", pytest.param("each", marks=slow)])
def test_two_ranks_go_on_with_the_bits_of_two(pair: Ranks, tmp_path: Path, way: str):
    """Whatever the head's updates, and with what a codec of gradients has left out so far."""
    before, after = (pair(run, way, cwd=tmp_path)[0] for run in (left, went_on))
    assert (before, before["steps"]) == (after, 10)


@slow
def test_three_ranks_go_on_as_two_would(pair: Ranks, triple: Ranks, tmp_path: Path):
    before = pair(left, "step", cwd=tmp_path)[0]
    after = triple(went_on, "step", cwd=tmp_path)[0]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
    assert before["tensors"].keys() == after["tensors"].keys()
    assert any("exp_avg_sq" in name for name in before["tensors"])
    for name, values in before["tensors"].items():
        assert after["tensors"][name] == pytest.approx(values, rel=1e-3, abs=1e-5), name
