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
def test_any_text_is_workers_or_one_clear_line(text: str):
    try:
        specs = parse_workers(text, 4)
    except InvalidInput as error:
        assert str(error).startswith("workers: ")
        assert "\n" not in str(error)
    else:
        assert 1 <= len(specs) <= MOST_WORKERS


def test_the_example_of_the_command_line():
    assert parse_workers("cpu:1,cpu:2@slow=16,gpu:0", 2) == (
        WorkerSpec("cpu", threads=1),
        WorkerSpec("cpu", threads=2, slow=16.0),
        WorkerSpec("gpu", index=0),
    )


@pytest.mark.parametrize(
    ("text", "cores", "threads"), [("1", 4, 4), ("2", 4, 2), ("3", 4, 1), ("5", 4, 1)]
)
def test_a_number_shares_the_cores(text: str, cores: int, threads: int):
    assert parse_workers(text, cores) == (WorkerSpec("cpu", threads=threads),) * int(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' (worker 0) is not of the form cpu:THREADS"),
        ("cpu", "'cpu' (worker 0)"),
        ("cpu:1,,cpu:1", "'' (worker 1)"),
        ("cpu:1,tpu:1", "'tpu:1' (worker 1)"),
        ("cpu:0", "'cpu:0': has from 1 to"),
        ("cpu:5000", "has from 1 to 4096 threads"),
        ("cpu:1@slow=0.5", "slowed down only from 1 up"),
        ("cpu:1@slow=", "'cpu:1@slow=' (worker 0)"),
        ("cpu:1@slow=inf", "'cpu:1@slow=inf' (worker 0)"),
        ("cpu:1@fast=2", "'cpu:1@fast=2' (worker 0)"),
        ("gpu:0@slow=2", "only a worker on a CPU can be slowed down"),
        ("gpu:1,cpu:1,gpu:1", "gpu:1 stands twice"),
        ("0", "from 1 to 256 can train one model, not 0"),
        ("257", "not 257"),
        ("-1", "'-1' (worker 0)"),
        ("1_0", "'1_0' (worker 0)"),
        (",".join(["cpu:1"] * 257), "not 257"),
    ],
)
def test_what_is_no_worker_is_named(text: str, message: str):
    with pytest.raises(InvalidInput) as raised:
        parse_workers(text, 2)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("workers", "cores", "threads"),
    [
        ("gpu:0", 16, 16),
        ("cpu:12,gpu:0", 16, 4),
        ("cpu:4,gpu:0,cpu:4,gpu:1", 16, 4),
        ("cpu:16,gpu:0", 16, 1),
        ("cpu:32,gpu:0,gpu:1", 16, 1),
        ("cpu:3", 16, 13),
    ],
)
def test_updates_of_gpus_are_added_on_the_cores_that_others_leave(workers, cores, threads):
    assert adding_threads(parse_workers(workers, cores), cores) == threads
