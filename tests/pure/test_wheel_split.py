from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from boxes import FLOPS_PER_S
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import Purpose, wire_format
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import messages, on_the_wire, split
from wheels import BODY, CROSSING, HEAD, SAMPLES, layer, model


def test_the_formula_is_table_1s():
    sent = messages(split(model(), Wheel()), Wheel())
    assert {purpose.value: message.nbytes for purpose, message in sent.items()} == {
        "labels": 4 * SAMPLES,
        "activations": CROSSING,
        "activation_gradients": CROSSING,
        "parameters": BODY,
        "gradients": BODY,
        "head_parameters": HEAD,
        "head_gradients": HEAD,
    }


def test_codecs_shrink_what_they_are_named_for():
    config = Wheel(
        activations="dynamic8",
        activation_gradients="half",
        parameters="bfloat16",
        gradients="onebit",
    )
    sent = messages(split(model(), config), config)
    values = CROSSING // 4
    assert sent[Purpose.ACTIVATIONS].nbytes == wire_format("dynamic8").nbytes(values)
    assert sent[Purpose.ACTIVATION_GRADIENTS].nbytes == 2 * values
    assert sent[Purpose.PARAMETERS].nbytes == BODY // 2
    assert sent[Purpose.GRADIENTS].nbytes == wire_format("onebit").nbytes(BODY // 4)
    assert sent[Purpose.LABELS].nbytes == 4 * SAMPLES


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
    sizes = [one.gradient_nbytes for one in layers]
    whole = 4 + 2 * sum(sizes)
    costs = {
        f"l{first}": 4 + 2 * (layers[first - 1].activation_nbytes + sum(sizes[:first]))
        for first in range(num_convolutions, len(layers))
    }
    if min(costs.values()) >= whole and layers[-1].activation_nbytes >= sum(sizes):
        with pytest.raises(InvalidInput, match="no head worth splitting off"):
            split(work, Wheel())
        return
    found = split(work, Wheel())
    if min(costs.values()) >= whole:  # asynchronous data parallelism
        assert (found.first, found.head.layers, found.body.layers) == ("loss", (), layers)
        crossing = 2 * layers[-1].activation_nbytes
        assert on_the_wire(messages(found, Wheel())) == whole + crossing
        return
    assert costs[found.head.layers[0].name] == min(costs.values())
    assert on_the_wire(messages(found, Wheel())) == min(costs.values())


def test_a_named_head_begins_there():
    parts = split(model(), Wheel(head="c1"))
    assert [one.name for one in parts.body.layers] == ["c0"]
    assert [one.name for one in parts.head.in_backward_order] == ["f1", "f0", "c1"]
    assert parts.head.input_nbytes == 8 * CROSSING


def test_a_head_smaller_than_its_activations_is_refused_with_both_sizes():
    small = Workload(
        "s",
        SAMPLES,
        (layer("c", (4, 3, 3, 3), 10**6, 1.0), layer("f", (100, 10), 10**5, 1.0)),
        (1, 0),
        0,
    )
    with pytest.raises(
        InvalidInput, match=r"begins with f, .* of 10 samples are 2 MB, .* 0.008 MB"
    ):
        split(small, Wheel())


@pytest.mark.parametrize("field", [{"workers": 0}, {"lanes": 0}, {"gradients": "zip"}, {"lane": 2}])
def test_configurations_that_make_no_sense_are_refused(field):
    with pytest.raises((ValidationError, InvalidInput, TypeError)):
        Wheel(**field)
