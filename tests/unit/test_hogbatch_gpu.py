"""A replica on the simulated GPU, compared with torch's training on the host.

Other workers add their updates while no copy of the shared model is in progress, so that results
are deterministic.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hogbatch_replicas import net, samples
from hogbatches import classifying
from paceline.core.compare import conform
from paceline.core.plan import Kind
from paceline.core.timeline import Origin, Timeline
from paceline.exchange.step import OF_CLASSES
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
    return net().double()


def batches(num: int = len(SIZES)) -> list[Tensor]:
    """Return the samples of each batch."""
    return [(torch.arange(size) + 5 * number) % 40 for number, size in enumerate(SIZES[:num])]


def rate(number: int) -> float:
    return (1.0, 0.5, 2.0)[number % 3]


@contextmanager
def unharmed() -> Iterator[SimulatedDevice]:
    """Yield a simulated device without delays; raise what failed on it."""
    with simulated_gpus() as (found,):
        found.delays = lambda stream, what: 0.0
        yield found


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with unharmed() as found:
        yield found


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
    memory = SharedTensors.of(tensors_of(build()), "a model")
    memory.close()
    unpin = device.pin(memory.memory)
    recipe = classifying(build, data or samples())
    replica = GpuReplica(recipe, memory, make, OF_CLASSES, 0, device, depth)
    yield Case(replica, memory)
    unpin()


class Naive:
    """Reference on the host without streams: an update is the difference of two copies.

    `places`: the number of batches in progress, whose updates are not yet in the shared model.
    """

    def __init__(
        self, build: Callable[[], nn.Module], make: OptimizerFactory, data: tuple[Tensor, Tensor]
    ) -> None:
        self.model, self._data = build().train(), data
        self.own = tensors_of(self.model)
        self.shared = {name: tensor.detach().clone() for name, tensor in self.own.items()}
        self._optimizer = make(list(self.model.parameters()))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._in_work: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def train(self, rows: Sequence[Tensor], places: int, *, others: bool = False) -> None:
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


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("name", "momentum", "depth"),
    [
        *(pytest.param("SGD", 0.9, depth, marks=slow) for depth in (1, 2)),
        ("SGD", 0.9, 3),
        *(pytest.param(name, 0.0, 3, marks=slow) for name in ("sgd", "adam", "rmsprop")),
    ],
)
def test_alone_it_trains_as_torch_does(device, depth, name, momentum):
    make, data = optimizer_of(name, 0.05, momentum), samples(torch.float64)
    with sharing(device, double_net, make, data, depth=depth) as case:
        done = case.train(batches())
        expected = double_net().train()
        optimizer = make(list(expected.parameters()))
        for number, (rows, result) in enumerate(zip(batches(), done, strict=True)):
            optimizer.param_groups[0]["lr"] = 0.05 * rate(number)
            loss = cross_entropy(expected(data[0][rows]), data[1][rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert result.updates == 1
            assert result.loss == pytest.approx(len(rows) * loss.item(), rel=1e-10)
        assert_alike(case.memory.tensors, tensors_of(expected))
        assert int(case.memory.tensors["1.num_batches_tracked"]) == len(SIZES)


@pytest.mark.parametrize("depth", [3, *(pytest.param(one, marks=slow) for one in (1, 2))])
def test_with_other_workers_it_trains_as_a_naive_version_does(device, depth):
    make, data = optimizer_of("SGD", 0.05, 0.9), samples(torch.float64)
    naive = Naive(double_net, make, data)
    naive.train(batches(), max(1, depth - 1), others=True)
    with sharing(device, double_net, make, data, depth=depth) as case:
        done = case.train(batches(), others=True)
        assert [one.loss for one in done] == pytest.approx(naive.losses, rel=1e-10)
        assert_alike(case.memory.tensors, naive.shared)


class Count:
    """An optimizer that adds 1 to all parameters and ignores gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 1.0}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class Seen(nn.Module):
    """Records its weight in each batch, in the order in which the device computes.

    Its integer buffer counts batches. Its mask differs between replicas.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))
        self.register_buffer("mask", torch.arange(6) % 3 == number)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int32))
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls[1].add_(2)
        self.calls[0].add_(1)
        self.seen.append(torch.cat([self.weight.detach()[0, :1], self.mask.float()]))
        return inputs.masked_fill(self.mask, 0) @ self.weight.t()


@pytest.mark.parametrize(
    ("depth", "late"),
    [
        pytest.param(depth, late, marks=() if (depth, late) == (3, "d2h") else slow)
        for depth in DEPTHS
        for late in ("h2d", "d2h", "kernel", "")
    ],
)
def test_updates_are_neither_lost_nor_doubled_nor_missed_by_their_own_worker(device, depth, late):
    """Each batch adds 1, then others add OTHERS, so every update can be counted."""
    num_batches = 8
    device.delays = delayed({late: [2.5e-3]})
    built: list[Seen] = []

    def build() -> Seen:
        built.append(Seen(len(built)))
        return built[-1]

    with sharing(device, build, Count, depth=depth) as case:  # type: ignore[arg-type]
        case.train(batches(num_batches), others=True)
        found = {name: tensor.tolist() for name, tensor in case.memory.tensors.items()}
        assert found["weight"] == [[num_batches * (1 + OTHERS)] * 6] * 4
        assert found["calls"] == [num_batches, 2 * num_batches]
        assert found["mask"] == built[0].mask.tolist() != Seen(1).mask.tolist()
        seen = [one.tolist() for one in built[-1].seen]
    added_by_then = [max(0, number - max(1, depth - 1) + 1) for number in range(num_batches)]
    weights = [number + OTHERS * added for number, added in enumerate(added_by_then)]
    assert seen == [[weight, *map(float, found["mask"])] for weight in weights]


def delayed(seconds: dict[str, Sequence[float]]) -> Callable[[SimulatedStream, str], float]:
    """Return a function that repeats the delays of kernels ("kernel") and copies ("h2d", "d2h")."""
    turns = {what: cycle(some) for what, some in seconds.items()}

    def delay(stream: SimulatedStream, what: str) -> float:
        kind = what if what in ("h2d", "d2h") else "kernel"
        return next(turns[kind]) if kind in turns else 0.0

    return delay


@cache
def bits_after(depth: int, **delays: tuple[float, ...]) -> list[bytes]:
    """Train on seven batches; return the bytes of the shared model and of the losses."""
    with unharmed() as device, sharing(device, depth=depth) as case:
        device.delays = delayed(delays)
        done = case.train(batches(7), others=True)
        losses = torch.tensor([one.loss for one in done], dtype=torch.float64)
        return [bytes(case.memory.memory.numpy()), bytes(losses.numpy())]


DELAYS = st.lists(st.sampled_from([0.0, 1e-4, 2e-3]), min_size=1, max_size=5).map(tuple)


@slow
@settings(max_examples=25)  # each takes a second
@given(kernel=DELAYS, h2d=DELAYS, d2h=DELAYS, depth=st.sampled_from(DEPTHS))
def test_delays_do_not_change_a_bit(kernel, h2d, d2h, depth):
    assert bits_after(depth, kernel=kernel, h2d=h2d, d2h=d2h) == bits_after(depth)


@slow
@pytest.mark.parametrize("name", ["sgd", "SGD", "adam"])
@each_depth
def test_a_batch_with_a_nan_loss_changes_no_parameter_and_no_other_batch(device, name, depth):
    momentum = 0.9 if name == "SGD" else 0.0
    make, data = optimizer_of(name, 0.05, momentum), samples(torch.float64)
    inputs = data[0].clone()
    inputs[batches()[4][0]] = torch.nan  # a sample of the fifth batch and some others
    is_lost = [bool(inputs[rows].isnan().any()) for rows in batches()]
    assert 1 < sum(is_lost) < len(is_lost) - 2
    bad = inputs, data[1]
    naive = Naive(double_net, make, bad)
    naive.train(batches(), max(1, depth - 1))
    with sharing(device, double_net, make, bad, depth=depth) as case:
        done = case.train(batches())
        assert [one.loss != one.loss for one in done] == is_lost
        assert_alike(case.memory.tensors, naive.shared)
        assert not any(one.isnan().any() for one in case.memory.tensors.values())


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


class Gated(nn.Module):
    """A layer whose forward pass ends on the device only after the gate is opened."""

    def __init__(self, gate: threading.Event, device: SimulatedDevice) -> None:
        super().__init__()
        self.layer, self.gate, self.device = nn.Linear(6, 4), gate, device

    def forward(self, inputs: Tensor) -> Tensor:
        self.device.current_stream().run_last(self.gate.wait)
        return self.layer(inputs)


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
    with sharing(device, lambda: Gated(gate, device)) as case:
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
    assert all(list(one[2:]) == sorted(one[2:]) for one in done)
    ends = [one.ended_ns for one in done]
    assert ends == sorted(ends)
    assert all(later.begun_ns >= one.stepped_ns for one, later in pairwise(done))


class Scripted:
    """A replica with two batches in progress, which begin and end at given times."""

    def __init__(self, times: Sequence[tuple[int, int]]) -> None:
        self._times, self.num_begun = iter(times), 0

    def take(self, rows: Tensor, rate: float, step: int | None) -> list[BatchResult]:
        done = [self.result()] if self.num_begun == 2 else []
        self.num_begun += 1
        return done

    def done(self, *, waits: bool = False) -> Iterator[BatchResult]:
        while waits and self.num_begun:
            yield self.result()

    def result(self) -> BatchResult:
        self.num_begun -= 1
        started_ns, ended_ns = next(self._times)
        return BatchResult(1, 1.0, started_ns, ended_ns=ended_ns)


@pytest.mark.parametrize(
    ("times", "median_ns"),
    [
        # Two batches warm up; the others end 4 to 9 ns apart, although each is in progress for 12.
        ([(end - 12, end) for end in (100, 200, 204, 209, 218, 222, 230)], 5),
        # After a pause a batch takes the time from its own begin to its end.
        ([(0, 10), (10, 20), (100, 107), (200, 208), (300, 309), (0, 0), (0, 0)], 8),
    ],
)
def test_a_trial_measures_the_time_between_the_ends_of_batches(times, median_ns: int):
    scripted = Scripted(times)
    assert median_seconds(scripted, 40, 10, 0.0) == pytest.approx(1e-9 * median_ns)
    assert scripted.num_begun == 0
