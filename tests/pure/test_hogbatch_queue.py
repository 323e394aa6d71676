import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.strategies.hogbatch.policy import SampleQueue

# Who does what: workers 0 to 3 ask for so many samples; then one says it is done, or dies.
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["done", "done", "dies"])),
    max_size=60,
)


@given(st.integers(0, 50), EVENTS)
def test_every_sample_is_used_once_whoever_asks_and_dies(num_samples: int, events):
    """A dead worker's number asks again: that is a worker that has joined late."""
    pool = SampleQueue(num_samples)
    used = [0] * num_samples
    held: dict[int, range] = {}

    def end(worker: int, how: str) -> None:
        taken = held.pop(worker)
        if how == "dies":
            pool.give_back(taken)
            return
        pool.complete(taken)
        for place in taken:
            used[place] += 1

    for worker, size, how in events:
        if worker in held:
            end(worker, how)
            continue
        taken = pool.take(size)
        if taken:
            assert 1 <= len(taken) <= size
            held[worker] = taken
        in_work = sum(map(len, held.values()))
        assert len(pool) + in_work + sum(used) == num_samples
        out = [place for part in held.values() for place in part]
        assert len(out) == len(set(out))
        assert not any(used[place] for place in out)
        assert pool.is_done == (sum(used) == num_samples)
    for worker in list(held):
        end(worker, "done")
    while taken := pool.take(7):
        held[0] = taken
        end(0, "done")
    assert used == [1] * num_samples
    assert pool.is_done


def test_what_comes_back_joins_its_neighbours():
    pool = SampleQueue(12)
    first, second, third = pool.take(4), pool.take(4), pool.take(4)
    assert not pool
    pool.give_back(first)
    pool.give_back(third)
    pool.give_back(second)
    assert pool.take(12) == range(12)


def test_samples_that_are_not_out_do_not_come_back():
    pool = SampleQueue(8)
    taken = pool.take(4)
    pool.complete(taken)
    with pytest.raises(ValueError, match="samples 0 to 4 are not handed out"):
        pool.give_back(taken)
    pool.take(4)
    with pytest.raises(ValueError, match="samples 4 to 7 are not handed out"):
        pool.complete(range(4, 7))


@given(st.integers(1, 50), EVENTS)
def test_a_queue_made_of_what_is_free_hands_out_exactly_what_is_left(num_samples: int, events):
    """As a run that is resumed: what was done before the pause and after it is each sample once."""
    pool, used, held = SampleQueue(num_samples), [], {}
    for worker, size, how in events:
        if worker in held:
            taken = held.pop(worker)
            (pool.give_back if how == "dies" else pool.complete)(taken)
            used += taken if how == "done" else []
        elif taken := pool.take(size):
            held[worker] = taken
        assert pool.num_done == len(used)
    for taken in held.values():  # a pause: all finish what they have
        pool.complete(taken)
        used += taken
    resumed = SampleQueue(num_samples, pool.free)
    assert resumed.num_done == pool.num_done == len(used)
    while taken := resumed.take(7):
        resumed.complete(taken)
        used += taken
    assert resumed.is_done
    assert sorted(used) == list(range(num_samples))


@pytest.mark.parametrize(
    "free", [[range(3, 9)], [range(-1, 2)], [range(4, 6), range(1, 2)], [range(3), range(3, 5)]]
)
def test_ranges_that_are_no_parts_of_the_epoch_are_refused(free: list[range]):
    with pytest.raises(ValueError, match="are no parts of 8 samples"):
        SampleQueue(8, free)
