"""The workers of hogbatch as they are written: cpu:THREADS@slow=FACTOR and gpu:INDEX."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.strategies.hogbatch.config import (
    MOST_WORKERS,
    WorkerSpec,
    adding_threads,
    parse_workers,
)
from refusals import refused

CPUS = st.builds(
    WorkerSpec,
    kind=st.just("cpu"),
    threads=st.integers(1, 4096),
    slow=st.floats(1, 1e6).map(lambda factor: round(factor, 6)),
)
GPUS = st.integers(0, 10**6).map(lambda index: WorkerSpec("gpu", index=index))


@given(st.lists(CPUS | GPUS, min_size=1, max_size=8, unique_by=lambda spec: (spec.kind, spec)))
def test_what_is_written_is_read_back(specs: list[WorkerSpec]):
    assert parse_workers(", ".join(map(str, specs)), 2) == tuple(specs)


@given(st.text(max_size=40))
def test_any_text_is_workers_or_refused(text: str):
    try:
        specs = parse_workers(text, 4)
    except InvalidInput as error:
        assert error.field == "workers"
        assert "\n" not in str(error)
    else:
        assert 1 <= len(specs) <= MOST_WORKERS


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        (
            "cpu:1,cpu:2@slow=16,gpu:0",
            (WorkerSpec("cpu", 1), WorkerSpec("cpu", 2, slow=16.0), WorkerSpec("gpu", index=0)),
        ),
        # A number shares the four cores.
        *[(str(n), (WorkerSpec("cpu", own),) * n) for n, own in ((1, 4), (2, 2), (3, 1), (5, 1))],
    ],
)
def test_examples(text: str, specs: tuple[WorkerSpec, ...]):
    assert parse_workers(text, 4) == specs


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "'' (worker 0)"),
        ("cpu", "'cpu' (worker 0)"),
        ("cpu:1,,cpu:1", "'' (worker 1)"),
        ("cpu:1,tpu:1", "'tpu:1' (worker 1)"),
        ("cpu:0", "'cpu:0'"),
        ("cpu:5000", "4096"),
        ("cpu:1@slow=0.5", "'cpu:1@slow=0.5'"),
        ("cpu:1@slow=", "'cpu:1@slow=' (worker 0)"),
        ("cpu:1@slow=inf", "'cpu:1@slow=inf' (worker 0)"),
        ("cpu:1@fast=2", "'cpu:1@fast=2' (worker 0)"),
        ("gpu:0@slow=2", "'gpu:0@slow=2'"),
        ("gpu:1,cpu:1,gpu:1", "gpu:1"),
        ("0", "256"),
        ("257", "256"),
        ("-1", "'-1' (worker 0)"),
        ("1_0", "'1_0' (worker 0)"),
        (",".join(["cpu:1"] * 257), "256"),
    ],
)
def test_what_is_no_worker_is_named(text: str, named: str):
    with refused("workers") as caught:
        parse_workers(text, 2)
    assert named in caught.value.problem


@pytest.mark.parametrize(
    ("workers", "threads"),
    [
        ("gpu:0", 16),
        ("cpu:12,gpu:0", 4),
        ("cpu:4,gpu:0,cpu:4,gpu:1", 4),
        ("cpu:16,gpu:0", 1),
        ("cpu:32,gpu:0,gpu:1", 1),
        ("cpu:3", 13),
    ],
)
def test_updates_of_gpus_are_added_on_the_cores_that_others_leave(workers, threads):
    assert adding_threads(parse_workers(workers, 16), 16) == threads
