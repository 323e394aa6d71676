"""Paced and stretched models, on a simulated clock that advances only while a layer sleeps.

A paced model has the names, sizes and order of a real model's layers, and given times. In a
stretched model, each layer takes `factor` times as long.
"""

import copy
from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from boxes import chain
from nets import Net
from paceline.core.plan import Kind
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.record.recorder import Recorder
from paceline.training.models import describe, find, layers_of
from paceline.training.models import paced as module_of_paced
from paceline.training.models.inception import InceptionBlock
from paceline.training.models.networks import BasicBlock
from paceline.training.models.paced import QUEUED_S, PacedModel, PacedSGD, Stretched
from refusals import refused
from ticking import Sleeping, Timed


def outputs(module: nn.Module) -> nn.Module:
    """Wrap a module so that it returns only its first output."""
    return Net(lambda net, x: net.module(x)[0], module=module)


def with_root() -> nn.Module:
    """Return a model with a parameter of its root and a layer within a layer."""
    outer = outputs(nn.Linear(4, 3))
    outer.shift = nn.Parameter(torch.zeros(3))
    compute = lambda net, x: net.outer(x * net.scale) + net.outer.shift  # noqa: E731
    return Net(compute, scale=nn.Parameter(torch.ones(4)), outer=outer)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet5": (lambda: find("lenet5").build(None), (2, 1, 32, 32)),
    "block": (lambda: BasicBlock(8, 8, 1, nn.Conv2d(8, 8, 1)), (2, 8, 8, 8)),
    "inception": (lambda: InceptionBlock(8, (4, 2, 4, 2, 4, 4)), (2, 8, 8, 8)),
    "lstm": (lambda: outputs(nn.LSTM(3, 4, num_layers=2)), (5, 2, 3)),
    "root": (with_root, (2, 4)),
}


def workload_of(name: str) -> Workload:
    build, shape = MODELS[name]
    return describe(build(), torch.zeros(shape), name)


def instant(workload: Workload, *output_shape: int) -> PacedModel:
    times = [0.0] * len(workload.layers)
    return PacedModel(workload, times, times, output_shape or (1,))


def layers(count: int) -> Workload:
    """Create a chain of layers 'l0', 'l1', ... with one parameter each."""
    return chain(*[(0, 24)] * count)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Sleeping:
    sleeping = Sleeping()
    monkeypatch.setattr(module_of_paced, "time", sleeping)
    return sleeping


@pytest.mark.parametrize("name", MODELS)
def test_layers_parameters_and_gradients_are_those_of_the_real_model(name: str):
    """`describe` finds the same as for the real model, except for costs."""

    def found(model: nn.Module) -> dict[str, dict[str, torch.Size]]:
        return {layer.name: {n: p.shape for n, p in layer.parameters} for layer in layers_of(model)}

    real = workload_of(name)
    model = instant(real)
    assert found(model) == found(MODELS[name][0]())
    assert all(p.dtype is torch.float32 and not p.any() for p in model.parameters())
    assert not list(model.buffers())
    seen = describe(model, torch.zeros(2, 1))
    assert [layer.name for layer in seen.layers] == [layer.name for layer in real.layers]
    assert seen.backward_order == real.backward_order
    assert [set(layer.parameters) for layer in seen.layers] == [
        set(layer.parameters) for layer in real.layers
    ]


def test_gradients_are_handed_over_and_not_copied():
    model = instant(workload_of("lenet5"))
    optimizer = PacedSGD(model.parameters(), 0.0)
    steps = []
    for _ in range(2):
        model(torch.zeros(2, 1)).sum().backward()
        # Keep the gradients, so that copies of a second step would have other addresses.
        steps.append([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    first, second = steps
    assert all(p.grad is None for p in model.parameters())
    assert [g.data_ptr() for g in first] == [g.data_ptr() for g in second]
    assert all(one is not other for one, other in zip(first, second, strict=True))
    assert [g.shape for g in first] == [p.shape for p in model.parameters()]
    assert all(g.is_contiguous() and not g.any() for g in first)


def test_scores_fit_the_usual_loss():
    model = instant(layers(2), 5)
    scores = model(torch.zeros(3, 1, 8, 8))
    assert scores.shape == (3, 5)
    loss = cross_entropy(scores, torch.tensor([0, 4, 2])) * 0.5
    loss.backward()
    assert torch.isfinite(loss)
    with torch.no_grad():
        assert not model(torch.zeros(3, 1)).requires_grad


def test_a_copy_has_its_own_gradients():
    model = instant(workload_of("root"))
    twin = copy.deepcopy(model)
    twin(torch.zeros(2, 1)).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_every_layer_takes_its_time(clock: Sleeping):
    """A recorder measures the requested times, including that of the update."""
    model = PacedModel(workload_of("root"), [1, 2, 4], [8, 16, 32])
    names = [layer.name for layer in workload_of("root").layers]
    optimizer = PacedSGD(model.parameters(), 64)
    recorder = Recorder(clock, "gpu0", 0)
    recorder.start_trace(model)
    with recorder.phase(Kind.FORWARD):
        loss = model(torch.zeros(2, 1)).sum()
    with recorder.phase(Kind.BACKWARD):
        loss.backward()
    with recorder.phase(Kind.STEP):
        optimizer.step()
    spans = [(span.part, span.start_s, span.end_s) for span in recorder.spans()]
    recorder.stop_trace()
    forward = [(names[0], 0, 1), (names[1], 1, 3), (names[2], 3, 7)]
    backward = dict(zip(names, (8, 16, 32), strict=True))
    ready, now = [], 7
    for layer in workload_of("root").in_backward_order:
        ready.append((layer.name, now, now + backward[layer.name]))
        now += backward[layer.name]
    assert spans == [*forward, *ready, ("", 63, 127)]


def backward_times(clock: Sleeping, hooks_s: list[float], backward_s: list[float]) -> list[float]:
    """Return when the gradients of a chain arrive, from 'l0' on; their hooks take `hooks_s`."""
    num_layers = len(backward_s)
    model = PacedModel(layers(num_layers), [0.0] * num_layers, backward_s)
    times = [0.0] * num_layers
    for number, parameter in enumerate(model.parameters()):

        def ready(_: Tensor, number: int = number) -> None:
            times[number] = clock.now
            clock.now += hooks_s[number]

        parameter.register_post_accumulate_grad_hook(ready)
    loss = model(torch.zeros(2, 1)).sum()
    started = clock.now = clock.now + 1000  # time between forward and backward
    loss.backward()
    return [when - started for when in times]


@pytest.mark.parametrize(
    ("late_s", "hooks_s", "backward_s", "times"),
    [
        (0.25, [0, 0, 0], [4, 2, 1], [7.25, 3.25, 1.25]),  # delays of waking up do not add up
        # Layers shorter than the delay of waking up catch up with it.
        (0.25, [0] * 8, [0.125] * 8, [1.125, 1.125, 0.75, 0.75, 0.75, 0.375, 0.375, 0.375]),
        # A hook runs during the next layer, and delays it only if it takes longer.
        (0, [0, 0, 1.5], [4, 2, 1], [7, 3, 1]),
        (0, [0, 0, 2], [4, 2, 1], [7, 3, 1]),
        (0, [0, 0, 3], [4, 2, 1], [10, 6, 1]),
    ],
)
def test_when_gradients_arrive(clock: Sleeping, late_s, hooks_s, backward_s, times):
    clock.late_s = late_s
    assert backward_times(clock, hooks_s, backward_s) == times


def test_queued_short_layers_run_during_a_hook(clock: Sleeping):
    hook_s, layer_s = QUEUED_S / 2, QUEUED_S / 8
    times = backward_times(clock, [0] * 7 + [hook_s], [layer_s] * 8)
    assert times[::-1][:2] == pytest.approx([layer_s, layer_s + hook_s])  # its hook lags behind
    assert times[0] == pytest.approx(8 * layer_s)  # the layers do not


def test_building_the_graph_adds_no_time(clock: Sleeping, monkeypatch):
    apply = module_of_paced._Backward.apply

    def slowly(*given: object) -> Tensor:
        clock.now += 1
        return apply(*given)

    monkeypatch.setattr(module_of_paced._Backward, "apply", slowly)
    PacedModel(layers(3), [2, 2, 2], [0, 0, 0])(torch.zeros(2, 1))
    assert clock.now == 6


def test_an_update_begins_when_earlier_work_is_done(clock: Sleeping):
    """Otherwise an update would hide exposed communication."""
    model = PacedModel(layers(1), [1], [1])
    optimizer = PacedSGD(model.parameters(), 8)
    for _ in range(2):
        model(torch.zeros(2, 1)).sum().backward()
        clock.now += 5
        optimizer.step()
    assert clock.now == 2 * (1 + 1 + 5 + 8)


def test_parameters_of_another_size_are_refused():
    half = Layer("fc", (Parameter("fc.weight", (4,), 2),), 0, Cost(), Cost())
    with refused("net"):
        instant(Workload("net", 1, (half,), (0,), 0))


def twice(module: nn.Module, last: nn.Module) -> nn.Module:
    """Return a model with a shared module and two outputs."""

    def compute(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = net.module(net.module(x))
        return inner.relu(), net.last(inner)

    return Net(compute, module=module, last=last)


def checkpointed(module: nn.Module) -> nn.Module:
    """Return a model that recomputes its module in a nested backward pass."""
    return Net(lambda net, x: checkpoint(net.module, x, use_reentrant=True), module=module)


def spans(model: nn.Module, clock: Sleeping, exchange_s: float = 0.0) -> dict[Kind, list]:
    """Return (part, start, end) of a step's spans; the gap between the phases takes 100 s."""
    recorder = Recorder(clock, "cpu0", 0)
    recorder.start_trace(model)
    with recorder.phase(Kind.FORWARD):
        outputs = model(torch.ones(1, requires_grad=True))
    clock.now += 100
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: work(clock, exchange_s))
    with recorder.phase(Kind.BACKWARD):
        sum(outputs).sum().backward()
    recorder.stop_trace()
    return {
        kind: [(s.part, s.start_s, s.end_s) for s in recorder.spans() if s.kind is kind]
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }


def work(clock: Sleeping, seconds: float) -> None:
    clock.now += seconds


def timed(*times: tuple[float, float]) -> Callable[[Sleeping], nn.Module]:
    return lambda clock: nn.Sequential(*(Timed(clock, *one) for one in times))


Spans = list[tuple[str, float, float]]
CASES: dict[str, tuple[Callable[[Sleeping], nn.Module], float, float, Spans, Spans]] = {
    "a chain, with an exchange": (
        timed((2, 5), (3, 7)),
        *(3, 50),
        [("0", 0, 6), ("1", 6, 15)],
        [("1", 115, 136), ("0", 136, 136 + 50 + 15)],
    ),
    "a shared module and several outputs": (
        lambda clock: twice(Timed(clock, 2, 5), Timed(clock, 3, 7)),
        *(2, 0),
        [("module", 0, 8), ("last", 8, 14)],
        [("last", 114, 128), ("module", 128, 148)],
    ),
    "recomputation": (
        lambda clock: nn.Sequential(checkpointed(Timed(clock, 2, 5)), Timed(clock, 3, 7)),
        *(2, 0),
        [("0.module", 0, 4), ("1", 4, 10)],
        [("1", 110, 124), ("0.module", 124, 138)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_layer_takes_factor_times_as_long_both_ways(clock: Sleeping, case: str):
    build, factor, exchange_s, forward, backward = CASES[case]
    model = build(clock)
    Stretched(model, factor)
    assert spans(model, clock, exchange_s) == {Kind.FORWARD: forward, Kind.BACKWARD: backward}


def test_after_removal_a_model_is_as_fast_as_before(clock: Sleeping):
    model = timed((2, 5), (3, 7))(clock)
    Stretched(model, 3).remove()
    assert list(spans(model, clock).values()) == [
        *([("0", 0, 2), ("1", 2, 5)], [("1", 105, 112), ("0", 112, 117)])
    ]


def test_delays_of_late_wakeups_do_not_add_up(clock: Sleeping):
    clock.late_s = 0.5
    model = nn.Sequential(*(Timed(clock, 1, 1) for _ in range(8)))
    Stretched(model, 2)
    shares = spans(model, clock)
    assert shares[Kind.FORWARD][-1][2] == 16.5
    assert shares[Kind.BACKWARD][-1][2] == pytest.approx(132.5)


def test_an_output_that_is_an_input_too_is_stretched_once(clock: Sleeping):
    """Its gradient arrives during the backward pass of another output."""
    model = Net(lambda net, x: ((one := net.module(x)), net.module(one)), module=Timed(clock, 2, 5))
    Stretched(model, 2)
    assert spans(model, clock)[Kind.BACKWARD] == [("module", 108, 128)]


def test_a_recorder_that_was_there_first_sees_the_same(clock: Sleeping):
    model = nn.Sequential(Timed(clock, 2, 5), Timed(clock, 3, 7))
    entered: list[float] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: entered.append(clock.now))
    Stretched(model, 3)
    model(torch.ones(1))
    assert entered == [0, 6]


def test_every_backward_pass_is_stretched(clock: Sleeping):
    model = Timed(clock, 1, 5)
    Stretched(model, 2)
    loss = model(torch.ones(1))
    for passes in (1, 2):
        clock.now += 100
        loss.backward(retain_graph=True)
        assert clock.now == 2 + passes * 110


@pytest.mark.parametrize(
    "build",
    [
        lambda: BasicBlock(4, 4, 1, nn.Conv2d(4, 4, 1)),
        lambda: twice(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
    ],
)
def test_outputs_and_gradients_are_the_same_to_the_last_bit(build: Callable[[], nn.Module]):
    def step(factor: float | None) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(1)
        model, order = build(), []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        if factor is not None:
            Stretched(model, factor)
        inputs = torch.randn(2, 4, 5, 5, requires_grad=True)
        outputs = model(inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.sin().sum() for output in outputs).backward()
        values = [*outputs, inputs.grad, *(p.grad for p in model.parameters())]
        return [value.detach() for value in values], order

    (plain, ready), (slow, ready_slowly) = step(None), step(1.5)
    assert ready == ready_slowly
    assert all(torch.equal(one, other) for one, other in zip(plain, slow, strict=True))


def test_autograd_still_hands_over_gradients_without_a_copy():
    class Handed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, parameter: Tensor) -> Tensor:
            return parameter.new_zeros(())

        @staticmethod
        def backward(ctx, *_: Tensor) -> Tensor:
            return buffer.detach()

    buffer = torch.ones(3, 3)
    model = Net(lambda net: Handed.apply(net.weight), weight=nn.Parameter(torch.ones(3, 3)))
    Stretched(model, 1)
    model().backward()
    assert model.weight.grad.data_ptr() == buffer.data_ptr()


def test_factors_below_1_and_models_on_other_devices_than_the_cpu_are_refused():
    for factor in (0.5, 0, -1, nan, inf):
        with refused("factor"):
            Stretched(nn.Linear(1, 1), factor)
    with refused("model"):
        Stretched(nn.Linear(1, 1, device="meta"), 2)
