"""Which layers are split among the workers of subbatch, and which models are refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import named
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import cut, shares
from paceline.strategies.subbatch.plan import plan
from refusals import refused
from subbatches import (
    ATTENTION,
    BATCH,
    CONV,
    FC1,
    FC2,
    LANGUAGE,
    NET,
    NORM,
    OTHER,
    TOKEN_NORM,
    TOKENS,
    WIDTH,
    layer,
    model,
    ring_of,
)


@given(st.integers(1, 300), st.integers(1, 40))
def test_shares_are_as_equal_as_they_can_be(count, workers):
    parts = shares(count, workers)
    assert sum(parts) == count
    assert len(parts) == min(count, workers)
    assert max(parts) - min(parts) <= 1


KNOWN = [replace(FC1, kind="Linear"), replace(NORM, kind="BatchNorm1d")]
# A network of image patches that hands on one of its tokens, which is normalised.
PATCHES = layer("mixed", (WIDTH, WIDTH), out=9 * WIDTH)
# The gradients of fc1 are ready last: it is not on the way from conv to fc2 alone.
BRANCHED = Workload("net", BATCH, (CONV, FC1, FC2), (2, 0, 1), 0)


@pytest.mark.parametrize(
    ("workload", "first", "head"),
    [
        (NET, None, ["fc1", "fc2"]),  # the longest run of layers that can be split
        (NET, "fc2", ["fc2"]),
        (model(CONV, FC1, NORM, FC2), None, ["fc1", "norm", "fc2"]),
        (model(CONV, *KNOWN, FC2), None, ["fc1", "norm", "fc2"]),
        (model(CONV, NORM, FC1), None, ["fc1"]),
        # One that takes other inputs than the layer before has outputs is not its successor.
        (model(CONV, OTHER, FC1, FC2), None, ["fc1", "fc2"]),
        (model(FC1, FC2), None, ["fc2"]),  # the first stays in the body
        (LANGUAGE, None, ["head"]),  # a norm of tokens belongs to the body
        (model(CONV, PATCHES, NORM, FC2), None, ["fc2"]),
        # What normalises the outputs of a sample is no part of a head.
        (model(CONV, FC1, replace(NORM, kind="LayerNorm"), FC2), None, ["fc2"]),
        (BRANCHED, None, ["fc2"]),
    ],
)
def test_the_head_of_a_model(workload, first, head):
    parts = cut(workload, first, 2)
    assert [one.name for one in parts.head] == head
    assert parts.rows_per_sample == (TOKENS if workload is LANGUAGE else 1)
    assert len(parts.body.layers) + len(head) == len(workload.layers)


def test_a_layer_that_normalises_gathers_nothing():
    names = named(plan(model(CONV, FC1, NORM, FC2), ring_of(2), SubBatch(2), Window(1)))
    assert "send[norm/0]" not in names
    assert "backward[norm:weights/0]@worker0" not in names
    assert "send[fc2/0]" in names


NO_HEAD = "strategy subbatch"


@pytest.mark.parametrize(
    ("workload", "config", "field", "layer"),
    [
        (model(FC1, CONV), SubBatch(2), NO_HEAD, "conv"),
        (model(CONV, NORM), SubBatch(2), NO_HEAD, "norm"),
        (model(FC1), SubBatch(2), NO_HEAD, "fc1"),
        (model(CONV, ATTENTION, TOKEN_NORM), SubBatch(2), NO_HEAD, "norm"),
        (model(CONV, replace(FC1, kind="Embedding")), SubBatch(2), NO_HEAD, "fc1"),
        (model(CONV, replace(NORM, kind="Linear")), SubBatch(2), NO_HEAD, "norm"),
        (LANGUAGE, SubBatch(2, head="attention"), "head", "norm"),
        (NET, SubBatch(2, head="fc9"), "head", "fc9"),
        (NET, SubBatch(2, head="conv"), "head", "conv"),  # which has no body before it
        (model(FC2, CONV, FC1), SubBatch(2, head="conv"), "head", "conv"),
        (model(CONV, NORM, FC2), SubBatch(2, head="norm"), "head", "norm"),
        (BRANCHED, SubBatch(2, head="fc1"), "head", "fc1"),
        (NET, SubBatch(13), "workers", "fc2"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(workload, config, field, layer):
    with refused(field) as caught:
        plan(workload, ring_of(13), config, Window(1))
    assert repr(layer) in caught.value.problem
