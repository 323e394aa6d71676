"""A recorder's spans, by a clock that advances only while a layer computes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from boxes import box
from nets import Net
from paceline.core.compare import conform
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Kind
from paceline.core.strategy import Window
from paceline.exchange.step import Share, train_step
from paceline.links.clock import Clock
from paceline.record.merge import merge
from paceline.record.recorder import Recorder, Role
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan
from paceline.training.models import describe
from paceline.training.models.networks import LeNet5
from ticking import Ticking, Timed


def step_of(model: nn.Module, inputs: Tensor, recorder: Recorder) -> None:
    share = Share(inputs, torch.tensor([0, 2]), 1.0)
    train_step(model, torch.optim.SGD(model.parameters(), 0.01), iter([share]), recorder)


def traced(model: nn.Module, clock: Ticking, waiting_s: float = 0.0, backwards: int = 1):
    """Return (part, start, end) of a step's forward and backward spans, by kind."""
    recorder = Recorder(clock, "cpu0", 0)
    recorder.start_trace(model)
    with recorder.phase(Kind.FORWARD):
        clock.now += 1  # before the first layer
        loss = model(torch.ones(1)).sum()
        clock.now += 1  # after the last, as a loss function
    with recorder.phase(Kind.BACKWARD):
        for _ in range(backwards):
            loss.backward(retain_graph=True)
        clock.now += waiting_s
    recorder.stop_trace()
    spans = recorder.spans()
    assert {span.on for span in spans} == {(compute_lane("cpu0"),)}
    return {
        kind: [(span.part, span.start_s, span.end_s) for span in spans if span.kind is kind]
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }


def test_spans_are_the_times_in_which_layers_computed():
    clock = Ticking()
    clock.now = 100
    model = nn.Sequential(Timed(clock, 2, 5), nn.ReLU(), Timed(clock, 3, 7), Timed(clock, 4, 11))
    shares = traced(model, clock, waiting_s=50)
    # The first layer includes the time before it, the last one the time after it.
    assert shares[Kind.FORWARD] == [("0", 100, 103), ("2", 103, 106), ("3", 106, 111)]
    # No layer includes the 50 s after the last gradient.
    assert shares[Kind.BACKWARD] == [("3", 111, 122), ("2", 122, 129), ("0", 129, 134)]


def test_a_layer_that_is_entered_twice_has_one_span():
    clock = Ticking()
    first, again, other = Timed(clock, 1, 1), Timed(clock, 2, 5), Timed(clock, 3, 7)
    shares = traced(nn.Sequential(first, again, other, again), clock)
    assert shares[Kind.FORWARD] == [("0", 0, 2), ("1", 2, 4), ("2", 4, 10)]
    # Its gradient, the sum over both uses, is ready after that of the other layer.
    assert shares[Kind.BACKWARD] == [("2", 10, 22), ("1", 22, 27), ("0", 27, 28)]
    # With two backward passes, a layer ends with its gradients in the second.
    clock = Ticking()
    model = nn.Sequential(Timed(clock, 2, 5), Timed(clock, 3, 7))
    shares = traced(model, clock, backwards=2)
    assert shares[Kind.BACKWARD] == [("1", 7, 26), ("0", 26, 31)]


def test_a_layer_ends_with_the_last_of_its_gradients():
    clock = Ticking()
    pair = Net(
        lambda net, x: net.second(net.first(x * net.weight)) + net.bias,
        weight=nn.Parameter(torch.ones(())),
        bias=nn.Parameter(torch.zeros(())),
        first=Timed(clock, 1, 5),
        second=Timed(clock, 1, 7),
    )
    backward = traced(pair, clock)[Kind.BACKWARD]
    assert [(part, end - start) for part, start, end in backward] == [
        ("second", 7),
        ("first", 5),
        ("(root)", 0),  # its bias is ready first, its weight last
    ]


def num_hooks(model: nn.Module) -> int:
    on_modules = sum(len(module._forward_pre_hooks) for module in model.modules())
    on_gradients = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    return on_modules + on_gradients


def test_hooks_are_there_only_while_tracing():
    model, recorder, found = LeNet5(), Recorder(Clock(), "cpu0", 0), []
    for change in (recorder.stop_trace, lambda: recorder.start_trace(model)) * 2:
        change()
        found.append((num_hooks(model), recorder.tracing))
    assert found == [(0, False), (5 + 10, True)] * 2


def test_recording_changes_no_result():
    torch.manual_seed(0)
    bare, inputs = LeNet5(), torch.randn(2, 1, 32, 32)
    recorded, recorder = copy.deepcopy(bare), Recorder(Clock(), "cpu0", 0)
    step_of(bare, inputs, recorder)
    recorder.start_trace(recorded)
    step_of(recorded, inputs, recorder)
    assert all(map(torch.equal, bare.parameters(), recorded.parameters()))


def test_untraced_steps_leave_only_their_ends():
    model = LeNet5()
    clock = Ticking(mark_s=1)
    recorder = Recorder(clock, "cpu0", 0)
    for _ in range(3):
        step_of(model, torch.randn(2, 1, 32, 32), recorder)
    assert clock.now == 3
    assert (recorder.spans(), recorder.step_ends(), recorder.step_ends()) == ([], [0, 1, 2], [])


def test_a_trace_that_keeps_the_latest_steps_keeps_their_ends() -> None:
    clock = Ticking(mark_s=1)
    recorder = Recorder(clock, "cpu0", 0)
    recorder.start_trace(num_kept=2)
    for _ in range(5):
        recorder.end_step()
    assert recorder.step_ends() == [2, 3, 4]


def test_a_second_trace_forgets_the_first_and_a_pass_outside_of_a_phase_leaves_no_mark():
    clock = Ticking()
    model, recorder = nn.Sequential(Timed(clock, 1, 1)), Recorder(clock, "cpu0", 0)
    for _ in range(2):
        recorder.start_trace(model)
        step_of(model, torch.ones(2, 3), recorder)
        recorder.end(recorder.begin(Kind.REDUCE, "0"))
        recorder.stop_trace()
    assert len(recorder.spans()) == 5
    recorder.start_trace(model)
    model(torch.ones(1)).backward()
    assert recorder.spans() == []


def test_an_exchange_lasts_from_joining_to_leaving_under_the_name_that_all_ranks_use():
    clock = Ticking()
    recorder = Recorder(clock, "gpu1", 1)
    assert recorder.begin(Kind.REDUCE, "0") is None
    recorder.end(None)
    recorder.start_trace(nn.Linear(1, 1))
    first, unfinished = recorder.begin(Kind.REDUCE, "0"), recorder.begin(Kind.REDUCE, "1")
    assert unfinished is not None
    clock.now += 3
    recorder.end(first)
    (span,) = recorder.spans()
    assert (span.name, span.kind, span.part) == ("s0/reduce[0]", Kind.REDUCE, "0")
    assert (span.on, span.start_s, span.end_s) == ((exchange_lane("gpu1"),), 0, 3)


def test_an_exchange_that_is_joined_amid_a_layers_gradients_starts_with_the_last_of_them():
    clock = Ticking()
    recorder = Recorder(clock, "cpu0", 0)
    pair = nn.Linear(1, 1)  # torch computes both gradients at once, and hands over the bias first
    model = nn.Sequential(nn.Linear(1, 1), pair)
    recorder.start_trace(model)

    def join(_: Tensor) -> None:
        recorder.end(recorder.begin(Kind.REDUCE, "0"))
        clock.now += 3  # another thread has the core

    pair.bias.register_post_accumulate_grad_hook(join)
    with recorder.phase(Kind.BACKWARD):
        model(torch.ones(1, 1)).sum().backward()
    spans = {span.name: span for span in recorder.spans()}
    layer, exchange = spans["s0/backward[1]@worker0"], spans["s0/reduce[0]"]
    assert (layer.start_s, layer.end_s) == (0, 3)
    assert (exchange.start_s, exchange.end_s) == (3, 3)


def test_earlier_hooks_run_after_the_marks_of_their_layers():
    """A suspended exchange hook does not delay the collective, and copies belong to no layer."""
    clock = Ticking()
    recorder = Recorder(clock, "cpu0", 3)
    model = nn.Sequential(Timed(clock, 0, 5), Timed(clock, 0, 7))

    def copy_and_join(_: Tensor) -> None:
        copying = recorder.begin(Kind.REDUCE, "c", Role.ALONE)
        clock.now += 2
        recorder.end(copying)
        recorder.end(recorder.begin(Kind.REDUCE, "0"))
        clock.now += 3  # another thread has the core

    model[1].weight.register_post_accumulate_grad_hook(copy_and_join)
    recorder.start_trace(model)
    with recorder.phase(Kind.BACKWARD):
        model(torch.ones(1)).sum().backward()
    spans = [(span.name, span.start_s, span.end_s) for span in recorder.spans()]
    assert spans == [
        ("s0/backward[1]@worker3", 0, 7),
        ("s0/backward[0]@worker3", 9, 17),
        ("s0/reduce[c]@worker3", 7, 9),
        ("s0/reduce[0]", 9, 9),
    ]


def of_layers(compute: Callable[..., Tensor]) -> nn.Module:
    inner = {name: nn.Linear(8, 8) for name in ("one", "other", "aside")}
    return Net(compute, **inner, last=nn.Linear(8, 3))


# test_describe.py compares plans of shared weights and of attention with torch's order.
MODELS = {
    # One layer is never entered, and one has no influence on the loss.
    "unused": of_layers(lambda net, x: net.last(net.one(x)) + 0 * net.aside(x).detach().sum()),
    # One of two parameters of a layer gets no gradient.
    "half used": of_layers(lambda net, x: net.last(net.other(x) * net.one.bias)),
    # Weights of layers that are never entered.
    "functional": of_layers(
        lambda net, x: x @ net.one.weight @ net.last.weight.t() + net.last.bias
    ),
    # Branches run in the reverse order of their registration.
    "branched": of_layers(lambda net, x: net.last(net.other(x) + net.one(x))),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_recorded_steps_conform_to_the_plan(model):
    inputs = torch.randn(2, 8)
    tasks = plan(describe(model, inputs), box("cpu"), AllReduce(workers=1), Window(2))
    recorder = Recorder(Clock(), "cpu0", 0)
    recorder.start_trace(model)
    for _ in range(2):
        step_of(model, inputs, recorder)
    recorder.stop_trace()
    assert conform(tasks, merge([recorder.spans()], "measured")) == []
