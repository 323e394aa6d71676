"""The record of built-in models, compared with `describe` and with a synthetic model."""

from dataclasses import replace

import pytest
import torch

from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.records.built_in import _record, recorded, step_of
from paceline.training.recipes.named import workload_of
from recorded_models import RECORDED, record_of

SIZES = (1, 3, 160)  # one sample has other gradient sums, large batches other operations
QUICK = ("lenet5", "alexnet")  # models that `describe` processes quickly
RECORDED_WITH = _record()["torch"].partition("+")[0]


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORDED_WITH, reason=f"with torch {RECORDED_WITH}"
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RECORDED],
)
def test_the_record_is_what_describe_finds(name: str):
    """If this fails, update the record: python tests/recorded_models.py."""
    for size in SIZES:
        described, found = workload_of(name, size), recorded(name, size)
        assert found == described
        assert [one.kind for one in found.layers] == [one.kind for one in described.layers]


def bent(batch_size: int) -> Workload:
    """Return a layer whose working memory is the maximum of four lines in the batch size.

    Its backward pass has one call less for a single sample.
    """
    lines = ((1, 5000), (4, 1000), (7, 400), (30, -90000))
    layer = Layer(
        name="layer",
        parameters=(Parameter("weight", (5, 3)),),
        activation_nbytes=12 * batch_size,
        forward=Cost(30.0 * batch_size, 60.0 + 32 * batch_size, 2),
        backward=Cost(61.0 * batch_size, 8.0 * batch_size, 1 if batch_size == 1 else 2),
        kept_nbytes=8 * batch_size,
        working_nbytes=max(a * batch_size + c for a, c in lines),
        kind="Linear",
    )
    steady = replace(layer, name="steady", working_nbytes=17)
    return Workload("bent", batch_size, (layer, steady), (1, 0), 20 * batch_size)


def test_lines_that_hold_only_for_small_batches_are_found():
    record = record_of(bent)
    for size in (*range(1, 5000), 2**17, 2**20):
        assert step_of(record, "bent", size) == bent(size)


def test_concave_memory_is_refused():
    def saturating(batch_size: int) -> Workload:
        (layer, steady) = bent(batch_size).layers
        changed = replace(layer, working_nbytes=min(3 * batch_size, 1000))
        return replace(bent(batch_size), layers=(changed, steady))

    with pytest.raises(ValueError, match="lines"):
        record_of(saturating)


def test_other_models_and_larger_batches_are_not_recorded():
    assert recorded("mlp-54-16-2", 8) is None
    assert recorded("lenet5", 2**20 + 1) is None
