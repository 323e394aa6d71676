"""Stretched models: each layer takes `factor` times as long, on a simulated clock."""

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nets import Net
from paceline.core.plan import Kind
from paceline.record.recorder import Recorder
from paceline.training.models import paced
from paceline.training.models.networks import BasicBlock
from paceline.training.models.paced import Stretched
from refusals import refused
from ticking import Sleeping, Timed


def twice(module: nn.Module, last: nn.Module) -> nn.Module:
    """Return a model with a shared module and two outputs."""

    def compute(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = net.module(net.module(x))
        return inner.relu(), net.last(inner)

    return Net(compute, module=module, last=last)


def checkpointed(module: nn.Module) -> nn.Module:
    """Return a model that recomputes its module in a nested backward pass."""
    return Net(lambda net, x: checkpoint(net.module, x, use_reentrant=True), module=module)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Sleeping:
    sleeping = Sleeping()
    monkeypatch.setattr(paced, "time", sleeping)
    return sleeping


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
