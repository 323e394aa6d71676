"""A replica on the simulated GPU, compared with torch's training on the host.

Other workers add their updates while no copy of the shared model is in progress, so that results
are deterministic.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hogbatch_replicas import classifying, net, on_gpu, samples
from nets import Net
from paceline.core.compare import conform
from paceline.core.plan import Kind
from paceline.core.timeline import Origin, Timeline
from paceline.links.shared_memory import SharedTensors
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.gpu_replica import GpuReplica, clear_gradients
from paceline.strategies.hogbatch.messages import BatchResult, SpeedTrial
from paceline.strategies.hogbatch.replica import tensors_of
from paceline.strategies.hogbatch.speed_trial import plan_of_batches
from paceline.strategies.hogbatch.worker import median_seconds
from paceline.training.models import describe
from paceline.training.recipes.optimizers import OptimizerFactory, optimizer_of
from simulated_gpu.device import SimulatedDevice, SimulatedStream
from simulated_gpu.lent import simulated_gpus

DEPTHS = (1, 2, 3)
slow = pytest.mark.slow
each_depth = pytest.mark.parametrize("depth", DEPTHS)
SIZES = (10, 7, 10, 3, 12, 2, 9, 9, 5, 12, 4, 10)  # of batches, increasing and decreasing
OTHERS = 0.25  # added to every value by another worker; exact in any float type


def double_net() -> nn.Module:
    """Return a net with float64 parameters, and with int64 and bool buffers."""
    model = net().double()
    model.register_buffer("mask", torch.tensor([True, False, True]))
    return model


def batches(num: int = len(SIZES)) -> list[Tensor]:
    """Return the samples of each batch."""
    return [(torch.arange(size) + 5 * number) % 40 for number, size in enumerate(SIZES[:num])]


def rate(number: int) -> float:
    return (1.0, 0.5, 2.0)[number % 3]


class Case(NamedTuple):
    """A replica and the memory of its shared model."""

    replica: GpuReplica
    memory: SharedTensors

    def train(
        self, rows: Sequence[Tensor], *, others: bool = False, traced: bool = False
    ) -> list[BatchResult]:
        """Train on batches; with `others`, another worker updates the model after each batch."""
        done: list[BatchResult] = []
        for result in self._results(rows, traced):
            done.append(result)
            if others:
                add_others(self.memory.tensors)
        return done

    def next(self, rows: Tensor, number: int) -> None:
        """Begin a batch after ending the batches that must end first."""
        list(self.replica.take(rows, rate(number), number))

    def _results(self, rows: Sequence[Tensor], traced: bool) -> Iterator[BatchResult]:
        for number, one in enumerate(rows):
            yield from self.replica.take(one, rate(number), number if traced else None)
        yield from self.replica.done(waits=True)


def add_others(model: dict[str, Tensor]) -> None:
    for tensor in model.values():
        if tensor.is_floating_point():
            tensor.add_(OTHERS)


@contextmanager
def sharing(
    device: SimulatedDevice,
    build: Callable[[], nn.Module] = net,
    make: OptimizerFactory = optimizer_of("SGD", 0.1, 0.9),  # noqa: B008 - a function
    data: tuple[Tensor, Tensor] | None = None,
    *,
    depth: int = 3,
) -> Iterator[Case]:
    with on_gpu(classifying(build, data or samples()), make, device, depth=depth) as opened:
        yield Case(*opened)


class Naive:
    """Reference on the host without streams: an update is the difference of two copies.

    `places`: the number of batches in progress, whose updates are not yet in the shared model.
    """

    def __init__(
        self, build: Callable[[], nn.Module], make: OptimizerFactory, data: tuple[Tensor, Tensor]
    ) -> None:
        self.model, self._data = build().train(), data
        self.shared = {name: one.detach().clone() for name, one in tensors_of(self.model).items()}
        self.own = {n: one for n, one in tensors_of(self.model).items() if one.dtype != torch.bool}
        self._optimizer = make(list(self.model.parameters()))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._in_work: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def train(self, rows: Sequence[Tensor], places: int, *, others: bool) -> None:
        for number, one in enumerate(rows):
            while len(self._in_work) >= places:
                self._finish(others)
            self._begin(one, rate(number))
        while self._in_work:
            self._finish(others)

    def _finish(self, others: bool) -> None:
        for name, change in self._in_work.pop(0).items():
            self.shared[name] += change
        if others:
            add_others(self.shared)

    @torch.no_grad()
    def _begin(self, rows: Tensor, factor: float) -> None:
        for name, tensor in self.own.items():
            tensor.copy_(self.shared[name])
            for change in self._in_work:
                tensor += change[name]
        before = {name: tensor.clone() for name, tensor in self.own.items()}
        inputs, targets = (part[rows] for part in self._data)
        with torch.enable_grad():
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
        is_lost = not loss.isfinite()
        for parameter in self.model.parameters() if is_lost else ():
            parameter.grad = torch.zeros_like(parameter)
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * factor
        self._optimizer.step()
        self._optimizer.zero_grad()
        changed = self.own if not is_lost else before
        self._in_work.append({name: changed[name] - before[name] for name in before})
        self.losses.append(float(loss) * len(rows))


def check(
    device: SimulatedDevice,
    *,
    name: str = "SGD",
    momentum: float = 0.9,
    depth: int = 3,
    others: bool = True,
    poisoned: bool = False,
    **delays: Sequence[float],
) -> None:
    """Compare a replica with the naive reference; if `poisoned`, some losses are NaN."""
    make, (inputs, targets) = optimizer_of(name, 0.05, momentum), samples(torch.float64)
    if poisoned:
        inputs = inputs.clone()
        inputs[batches()[4][0]] = torch.nan  # a sample of the fifth batch and some others
    is_lost = [bool(inputs[rows].isnan().any()) for rows in batches()]
    assert not poisoned or 1 < sum(is_lost) < len(is_lost) - 2
    naive = Naive(double_net, make, (inputs, targets))
    naive.train(batches(), max(1, depth - 1), others=others)
    device.delays = delayed(delays)
    with sharing(device, double_net, make, (inputs, targets), depth=depth) as case:
        done = case.train(batches(), others=others)
        assert len(done) == len(SIZES)
        assert [one.loss != one.loss for one in done] == is_lost
        found = [one.loss for one in done]
        assert found == pytest.approx(naive.losses, rel=1e-10, nan_ok=True)
        for key, tensor in case.memory.tensors.items():
            expected = naive.shared[key].detach()
            torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-10, msg=key)


def delayed(seconds: dict[str, Sequence[float]]) -> Callable[[SimulatedStream, str], float]:
    """Return a function that repeats the delays of kernels ("kernel") and copies ("h2d", "d2h")."""
    turns = {what: cycle(some) for what, some in seconds.items()}

    def delay(stream: SimulatedStream, what: str) -> float:
        kind = what if what in ("h2d", "d2h") else "kernel"
        return next(turns[kind]) if kind in turns else 0.0

    return delay


@pytest.mark.parametrize(
    "options",
    [
        {"d2h": [2.5e-3]},
        {"others": False, "kernel": [1e-4]},
        # The copy of the model ends later than the update of the batch before.
        pytest.param({"h2d": [0.02]}, marks=slow),
    ],
)
def test_updates_are_neither_lost_nor_doubled_nor_missed_by_their_own_worker(device, options):
    """Without other workers, the reference trains as plain PyTorch does."""
    check(device, **options)


DELAYS = st.lists(st.sampled_from([0.0, 1e-4, 2e-3]), min_size=1, max_size=5)


@slow
@settings(max_examples=15)  # each takes seconds
@given(kernel=DELAYS, h2d=DELAYS, d2h=DELAYS, depth=st.sampled_from(DEPTHS))
def test_delays_do_not_change_the_model(kernel, h2d, d2h, depth):
    with simulated_gpus() as (device,):
        check(device, depth=depth, kernel=kernel, h2d=h2d, d2h=d2h)


@slow
@pytest.mark.parametrize("name", ["sgd", "SGD", "adam"])
@each_depth
def test_a_batch_with_a_nan_loss_changes_no_parameter_and_no_other_batch(device, name, depth):
    momentum = 0.9 if name == "SGD" else 0.0
    check(device, name=name, momentum=momentum, depth=depth, others=False, poisoned=True)


@slow
def test_batches_with_nan_losses_leave_the_shared_model_bitwise_unchanged(device):
    """Not even zeros are added: they could overwrite another worker's update and change -0.0."""
    inputs, targets = samples()
    with sharing(device, data=(inputs * torch.nan, targets)) as case:
        case.memory.tensors["3.bias"].fill_(-0.0)
        before = case.memory.memory.clone()
        case.train(batches(4))
        assert torch.equal(case.memory.memory, before)


def test_sparse_gradients_are_cleared_too():
    table = nn.Embedding(5, 3, sparse=True)
    (table(torch.tensor([1, 1, 4])) * torch.nan).sum().backward()
    clear_gradients([table.weight], torch.tensor(False))
    assert table.weight.grad.coalesce().values().isnan().any()
    clear_gradients([table.weight], torch.tensor(True))
    assert table.weight.grad.to_dense().tolist() == [[0.0] * 3] * 5


@slow
def test_the_host_waits_for_no_copy_in_training_or_trials(device):
    with sharing(device) as case:
        before = device.num_blocking_copies
        case.train(batches())
        case.train(batches(), traced=True)
        for most in (12, 3):
            assert median_seconds(case.replica, 40, most, 0.0) > 0
            assert not list(case.replica.done(waits=True))
        assert device.num_blocking_copies == before


def gated(gate: threading.Event, device: SimulatedDevice) -> nn.Module:
    """Create a layer whose forward pass ends on the device only after the gate is opened."""

    def compute(net: Net, inputs: Tensor) -> Tensor:
        device.current_stream().run_last(gate.wait)
        return net.layer(inputs)

    return Net(compute, layer=nn.Linear(6, 4))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate that is opened at the end, even after failures."""
    found = threading.Event()
    yield found
    found.set()


@slow
def test_copies_and_sums_overlap_with_computation(device, gate):
    """Copy neighbouring batches and add an update while a batch is computed.

    If one of these waited for the batch, it would never end; the simulated device reports that.
    """
    gate.set()
    with sharing(device, lambda: gated(gate, device)) as case:
        replica, rows = case.replica, batches(3)
        start = case.memory.tensors["layer.weight"].clone()
        case.next(rows[0], 0)
        device.synchronize()
        gate.clear()
        case.next(rows[1], 1)
        loaded = replica.load(rows[2])
        replica.finish()
        assert not torch.equal(case.memory.tensors["layer.weight"], start)
        replica.begin(loaded, 1.0, 2)
        replica.copy_in.synchronize()
        assert not list(replica.done())
        gate.set()
        case.train([])
        spans = {span.name: span for span in replica.spans}
        ended_s = spans["s1/forward[layer]@worker0"].end_s
        for name in ("s0/reduce[update]", "s2/h2d[batch]", "s2/h2d[model]"):
            assert spans[f"{name}@worker0"].end_s <= ended_s, name


def test_a_batch_is_computed_while_the_previous_update_is_copied(device, gate):
    with sharing(device) as case:
        replica, rows = case.replica, batches(3)
        case.next(rows[0], 0)
        device.synchronize()
        replica.copy_out.run_last(gate.wait)
        case.next(rows[1], 1)
        replica.finish()
        case.next(rows[2], 2)
        replica.compute.synchronize()
        assert not list(replica.done())
        gate.set()
        case.train([])


@slow
@each_depth
def test_traced_batches_conform_to_their_plan_and_have_their_times_in_order(device, depth):
    device.delays = delayed({"kernel": [1e-4], "h2d": [2e-3], "d2h": [3e-3]})
    spec, config = WorkerSpec("gpu"), Hogbatch(workers=1, gpu_depth=depth)
    with sharing(device, depth=depth) as case:
        case.train(batches(3))
        done = case.train(batches(), traced=True)
        spans = case.replica.spans
    work = describe(net(), torch.zeros(8, 6), "net")
    trials = [SpeedTrial(0, spec, {1: 1e-3, 32: 4e-3})]
    plan, _ = plan_of_batches(work, config, trials, {0: SIZES})
    assert conform(plan, Timeline(spans, Origin.MEASURED)) == []
    computed = {Kind.FORWARD, Kind.BACKWARD, Kind.STEP}
    assert {span.kind for span in spans} == {Kind.H2D, *computed, Kind.D2H, Kind.REDUCE}
    assert all(list(one[1:]) == sorted(one[1:]) for one in done)
    ends = [one.ended_ns for one in done]
    assert ends == sorted(ends)
    assert all(later.begun_ns >= one.stepped_ns for one, later in pairwise(done))
