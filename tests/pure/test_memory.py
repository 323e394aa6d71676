"""The memory of a step, from what layers keep and work with."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.workload import (
    Cost,
    Layer,
    Parameter,
    Workload,
    feature_nbytes,
    largest_batch,
    replica_nbytes,
)


def layer(name: str, values: int, kept: int, working: int | None) -> Layer:
    return Layer(name, (Parameter(name, (values,)),), kept, Cost(), Cost(), kept, working)


def workload(*layers: Layer, batch_size: int = 1) -> Workload:
    return Workload("test", batch_size, layers, tuple(reversed(range(len(layers)))), 8)


def test_gradients_come_as_feature_maps_go() -> None:
    # Backward of "b" has all that is kept and its own gradient; that of "a" has both gradients, but
    # no more what "b" kept.
    chain = workload(layer("a", 100, 1000, 20), layer("b", 10, 3000, 50))
    state, batch = 2 * 4 * 110, 8
    assert replica_nbytes(chain) == state + batch + max(
        1000 + 3000 + 4 * 10 + 50, 1000 + 4 * 110 + 20
    )
    late = workload(layer("a", 100, 3000, 20), layer("b", 10, 10, 50))
    assert replica_nbytes(late) == state + batch + 3000 + 4 * 110 + 20


def test_a_model_that_keeps_nothing_needs_three_copies() -> None:
    assert replica_nbytes(workload(layer("a", 100, 0, 0))) == 3 * 400 + 8


def test_without_gradients_features_alone_count() -> None:
    layers = (layer("a", 100, 1000, 20), layer("b", 10, 3000, 50))
    assert feature_nbytes(layers) == 4050
    assert feature_nbytes(()) == 0


@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 10**8))
def test_the_largest_batch_is_the_last_one_that_is_predicted_to_fit(kept, working, values, limit):
    chain = workload(layer("a", values + 1, kept + 1, working), layer("b", 7, 40, 30))

    def of(size: int) -> int:
        layers = [
            replace(
                one,
                kept_nbytes=size * (one.kept_nbytes or 0),
                working_nbytes=size * (one.working_nbytes or 0),
            )
            for one in chain.layers
        ]
        return replica_nbytes(replace(chain, layers=tuple(layers), input_nbytes=8 * size))

    found = largest_batch(chain, limit)
    assert of(found + 1) > limit
    assert found == 0 or of(found) <= limit
