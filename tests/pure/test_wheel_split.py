"""Where wheel cuts a model, what its messages weigh, and what its halves take in a rehearsal."""

from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import FLOPS_PER_S, box, link
from paceline.core.cost import Roofline, Totals, compute_lane, layer_times
from paceline.core.plan import Kind
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.wire_format import Purpose, wire_format
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.split import messages, on_the_wire, pace_of, split
from refusals import refused
from wheels import BODY, CROSSING, HEAD, SAMPLES, layer, model


def sizes(config: Wheel) -> dict[Purpose, int]:
    sent = messages(split(model(), config), config)
    return {purpose: message.nbytes for purpose, message in sent.items()}


def test_messages_are_those_of_table_1_and_codecs_shrink_what_they_are_named_for():
    plain = {
        "labels": 4 * SAMPLES,
        "activations": CROSSING,
        "activation_gradients": CROSSING,
        "parameters": BODY,
        "gradients": BODY,
        "head_parameters": HEAD,
        "head_gradients": HEAD,
    }
    assert sizes(Wheel()) == plain
    codecs = ("dynamic8", "half", "bfloat16", "onebit")
    fields = ("activations", "activation_gradients", "parameters", "gradients")
    assert sizes(Wheel(**dict(zip(fields, codecs, strict=True)))) == plain | {
        "activations": wire_format("dynamic8").nbytes(CROSSING // 4),
        "activation_gradients": CROSSING // 2,
        "parameters": BODY // 2,
        "gradients": wire_format("onebit").nbytes(BODY // 4),
    }


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**6), min_size=9, max_size=9),
)
def test_the_cut_found_sends_the_fewest_bytes_or_none_is(num_convolutions, matrices, handed_on):
    shapes = [(8, 8, 3, 3)] * num_convolutions + matrices
    layers = tuple(
        layer(f"l{i}", shape, 4 * n, 2 * prod(shape) / FLOPS_PER_S)
        for i, (shape, n) in enumerate(zip(shapes, handed_on, strict=False))
    )
    work = Workload("any", 1, layers, tuple(reversed(range(len(layers)))), 4)
    nbytes = [one.gradient_nbytes for one in layers]
    whole = 4 + 2 * sum(nbytes)
    costs = {
        f"l{first}": 4 + 2 * (layers[first - 1].activation_nbytes + sum(nbytes[:first]))
        for first in range(num_convolutions, len(layers))
    }
    least, last = min(costs.values()), layers[-1].activation_nbytes
    if least >= whole and last >= sum(nbytes):
        with refused("wheel"):
            split(work, Wheel())
        return
    found = split(work, Wheel())
    if least >= whole:  # asynchronous data parallelism
        assert (found.first, found.head.layers, found.body.layers) == ("loss", (), layers)
        assert on_the_wire(messages(found, Wheel())) == whole + 2 * last
        return
    assert costs[found.head.layers[0].name] == least
    assert on_the_wire(messages(found, Wheel())) == least


def test_a_named_head_begins_there():
    parts = split(model(), Wheel(head="c1"))
    assert [one.name for one in parts.body.layers] == ["c0"]
    assert [one.name for one in parts.head.in_backward_order] == ["f1", "f0", "c1"]
    assert parts.head.input_nbytes == 8 * CROSSING


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_rehearsal_paces_devices_by_what_layers_take_in_the_plan(kind: str):
    work, config = model(), Wheel(workers=1, lanes=1)
    ends = ("a", "b") if kind == "cpu" else ("gpu0", "gpu1")
    ways = [link(end, host, 1e15) for end, host in zip(ends, "ab", strict=True)]
    links = [link("a", "b", 1e12), *ways]
    machine = box(kind, kind, links=links, hosts="ab", device={"sync_latency_s": 0.25})
    roofline = Roofline.of(machine)
    rate = roofline.rates[compute_lane(machine.devices[0].name)]
    times = layer_times(work, rate, Totals(2.0, 5.0, 0.5))
    pace = pace_of(split(work, config), times, rate, kind == "gpu", None)
    usual = layer_times(work, rate)
    planned: Counter[tuple[Kind, str]] = Counter()
    for span in simulate(plan(work, machine, config, Window(1)), roofline).spans:
        planned[span.kind, span.part] += span.duration_s
    for phase, total_s, usual_s, paced_s in (
        (Kind.FORWARD, 2.0, usual.forward_s, pace.forward_s),
        (Kind.BACKWARD, 5.0, usual.backward_s, pace.backward_s),
    ):
        for one, alone_s, own_s in zip(work.layers, usual_s, paced_s, strict=True):
            handing_over_s = planned[phase, one.name] - alone_s
            assert own_s == pytest.approx(alone_s * total_s / sum(usual_s) + handing_over_s)
    assert sum(pace.forward_s) - 2.0 == pytest.approx(0.25 * (kind == "gpu"))
    assert sum(pace.backward_s) - 5.0 == pytest.approx(0.5 * (kind == "gpu"))
    assert (pace.update_s, pace.samples) == (0.5, work.batch_size)
