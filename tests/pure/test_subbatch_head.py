from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import named
from paceline.core.errors import InvalidInput
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import cut, shares
from paceline.strategies.subbatch.plan import plan
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


def test_the_head_is_the_longest_run_of_layers_that_can_be_split():
    assert [one.name for one in cut(NET, None, 2).head] == ["fc1", "fc2"]
    assert [one.name for one in cut(model(CONV, FC1, NORM, FC2), None, 2).head] == [
        "fc1", "norm", "fc2"
    ]  # fmt: skip
    assert [one.name for one in cut(model(CONV, NORM, FC1), None, 2).head] == ["fc1"]
    assert [one.name for one in cut(NET, "fc2", 2).head] == ["fc2"]
    # What takes other inputs than the layer before has outputs is not its successor.
    assert [one.name for one in cut(model(CONV, OTHER, FC1, FC2), None, 2).head] == [
        "fc1", "fc2"
    ]  # fmt: skip


def test_a_model_of_linear_layers_keeps_the_first_in_its_body():
    assert [one.name for one in cut(model(FC1, FC2), None, 2).body.layers] == ["fc1"]


def test_a_norm_of_tokens_belongs_to_the_body():
    parts = cut(LANGUAGE, None, 2)
    assert [one.name for one in parts.head] == ["head"]
    assert parts.rows_per_sample == TOKENS
    assert cut(NET, None, 2).rows_per_sample == 1


def test_layers_that_samples_go_through_more_often_are_no_part_of_a_head():
    # A network of image patches that hands on one of its tokens, which is normalised.
    patches, norm = layer("mixed", (WIDTH, WIDTH), out=9 * WIDTH), NORM
    parts = cut(model(CONV, patches, norm, FC2), None, 2)
    assert [one.name for one in parts.head] == ["fc2"]
    assert parts.rows_per_sample == 1


def test_what_normalises_the_outputs_of_a_sample_is_no_part_of_a_head():
    whole = replace(NORM, kind="LayerNorm")
    parts = cut(model(CONV, FC1, whole, FC2), None, 2)
    assert [one.name for one in parts.head] == ["fc2"]
    known = [replace(one, kind=kind) for one, kind in ((FC1, "Linear"), (NORM, "BatchNorm1d"))]
    parts = cut(model(CONV, *known, FC2), None, 2)
    assert [one.name for one in parts.head] == ["fc1", "norm", "fc2"]


def test_a_layer_that_normalises_gathers_nothing():
    names = named(plan(model(CONV, FC1, NORM, FC2), ring_of(2), SubBatch(2), Window(1)))
    assert "send[norm/0]" not in names
    assert "backward[norm:weights/0]@worker0" not in names
    assert "send[fc2/0]" in names


@pytest.mark.parametrize(
    ("workload", "config", "message"),
    [
        (model(FC1, CONV), SubBatch(2), "no head to split: layer 'conv' has parameters of"),
        (model(CONV, NORM), SubBatch(2), "layer 'norm' is not linear"),
        (model(FC1), SubBatch(2), "layer 'fc1' is not linear, or the only one"),
        (model(CONV, ATTENTION, TOKEN_NORM), SubBatch(2), "tied to the embedding has none: untie"),
        (model(CONV, replace(FC1, kind="Embedding")), SubBatch(2), "layer 'fc1' is Embedding; it"),
        (model(CONV, replace(NORM, kind="Linear")), SubBatch(2), "has the weight of another layer"),
        (LANGUAGE, SubBatch(2, head="attention"), "layer 'norm' normalises each of 5 rows"),
        (NET, SubBatch(2, head="fc9"), "no layer 'fc9'; choose one of conv, fc1, fc2"),
        (NET, SubBatch(2, head="conv"), "'conv' is the first layer of net"),
        (model(FC2, CONV, FC1), SubBatch(2, head="conv"), "layer 'conv' has parameters of shape"),
        (model(CONV, NORM, FC2), SubBatch(2, head="norm"), "layer 'norm' is not linear, and"),
        (NET, SubBatch(13), "layer 'fc2' of net has 12 outputs, which cannot be split among 13"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(workload, config, message):
    with pytest.raises(InvalidInput) as caught:
        plan(workload, ring_of(13), config, Window(1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_branches_are_no_head():
    # The gradients of fc1 are ready last: it does not lie on the way from conv to fc2 alone.
    branched = Workload("net", BATCH, (CONV, FC1, FC2), (2, 0, 1), 0)
    assert [one.name for one in cut(branched, None, 2).head] == ["fc2"]
    with pytest.raises(InvalidInput, match="gradients of layer 'fc1'"):
        cut(branched, "fc1", 2)
