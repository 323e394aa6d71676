"""Batches of wheel: their targets arrive as they were, and only what is like the first sample."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from paceline.data.batch import Batch
from paceline.recipes.recipe import Recipe
from paceline.strategies.wheel.batches import BatchLayout
from paceline.strategies.wheel.protocol import share_of, share_part, values_of
from refusals import refused

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def recipe_of(samples: list[Any], **more: Any) -> Recipe:
    kept = {"model": nn.Module, "loss": lambda outputs, targets: outputs, "name": "own"}
    return Recipe(train=samples, **kept, **more)


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (100 * torch.rand(shape)).to(dtype)


def sent(layout: BatchLayout, batch: Batch, count: int) -> Any:
    """Return a batch's targets after their way to the hub."""
    parts = layout.parts(layout.check(batch))
    assert len(parts) == layout.num_parts
    assert sum(part.nbytes for part in parts) == count * layout.nbytes
    layout.check_parts(parts, count)
    buffers = [values_of(part, torch.uint8, part.nbytes) for part in parts]
    return layout.targets(buffers, count)


LEAVES = st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(DTYPES)).map(
    lambda of: tensors(*of)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


@given(TREES, st.integers(1, 4))
def test_targets_of_any_structure_arrive_as_they_were(tree: Any, count: int):
    recipe = recipe_of([(torch.zeros(2), tree)] * count)
    batch = Batch.of(recipe.samples.__getitems__(range(count)))
    found, structure = tree_flatten(sent(BatchLayout(recipe), batch, count))
    expected, other = tree_flatten(batch.targets)
    assert structure == other
    for one, two in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert torch.equal(one, two)


def test_a_mapping_travels_whole():
    recipe = recipe_of([{"ids": torch.arange(3), "mask": torch.tensor([True, False, True])}] * 4)
    layout = BatchLayout(recipe)
    batch = Batch.of(recipe.samples.__getitems__([0, 1]))
    found = sent(layout, batch, 2)
    assert list(found) == ["ids", "mask"]
    assert all(torch.equal(found[key], batch.inputs[key]) for key in found)
    assert layout.nbytes == recipe.target_nbytes(1) == 3 * 8 + 3


def test_class_numbers_travel_as_in_table_1_and_others_as_they_are():
    samples = [(torch.zeros(2), torch.tensor(i % 5)) for i in range(10)]
    classes, numbers = recipe_of(samples, num_classes=5), recipe_of(samples)
    assert (classes.target_nbytes(3), numbers.target_nbytes(3)) == (None, 24)
    assert (BatchLayout(classes).nbytes, BatchLayout(numbers).nbytes) == (4, 8)
    for recipe in (classes, numbers):
        batch = Batch.of(recipe.samples.__getitems__([4, 2]))
        assert torch.equal(sent(BatchLayout(recipe), batch, 2), torch.tensor([4, 2]))


@pytest.mark.parametrize("label", [5, -1])
def test_a_class_that_there_is_not_is_refused(label: int):
    """On a GPU it would end the hub."""
    recipe = recipe_of([(torch.zeros(2), torch.tensor(0))], num_classes=5)
    layout, wrong = BatchLayout(recipe), Batch(torch.zeros(1, 2), torch.tensor([label]))
    with refused("targets"):
        sent(layout, wrong, 1)


SAMPLE = {"ids": torch.arange(3), "score": torch.tensor(0.5)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": torch.zeros(2, 4, dtype=torch.int64), "score": torch.zeros(2)},
        {"ids": torch.zeros(2, 3, dtype=torch.int32), "score": torch.zeros(2)},
        {"ids": torch.zeros(2, 3, dtype=torch.int64)},
        {"ids": torch.zeros(2, 3, dtype=torch.int64), "score": torch.zeros(2), "more": SAMPLE},
        torch.zeros(2, 3),
    ],
)
def test_batches_unlike_the_first_sample_are_refused_with_both(wrong: Any):
    layout = BatchLayout(recipe_of([SAMPLE] * 4))
    with refused("own"):
        layout.check(Batch(wrong, wrong))


def test_bytes_that_are_too_few_or_too_many_are_refused_by_name():
    layout = BatchLayout(recipe_of([SAMPLE] * 4))
    ids, scores = (memoryview(bytes(size)) for size in (2 * 24, 2 * 4))
    layout.check_parts((ids, scores), 2)
    for leaf, parts, count in (
        ("ids", (ids[:-1], scores), 2),
        ("ids", (ids, scores), 3),
        ("score", (ids, ids), 2),
    ):
        with refused(f"targets['{leaf}']"):
            layout.check_parts(parts, count)


def test_a_sample_without_targets_is_refused():
    with refused("own"):
        BatchLayout(recipe_of([(torch.zeros(2), ())]))


def test_the_size_and_weight_of_a_share_arrive():
    assert share_of(share_part(7, 0.25)) == (7, 0.25)
    for wrong in (-1, 2.5, float("nan"), float("inf"), 1e300):
        with refused("activations"):
            share_of(share_part(wrong, 1.0))
