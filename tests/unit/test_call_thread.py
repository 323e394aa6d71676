"""Calls of a background thread."""

import gc

import pytest

from paceline.links.call_thread import CallThread

DEADLINE_S = 30.0


class Owner:
    """An object without `close`, which its user drops."""


def test_a_call_that_exits_ends_the_wait_for_it():
    """An error that is no Exception would leave the caller waiting forever."""
    thread = CallThread("test")
    with pytest.raises(SystemExit):
        thread.submit(lambda: exec("raise SystemExit")).result(DEADLINE_S)
    with pytest.raises(SystemExit):  # calls after a failed call fail with the same error
        thread.submit(int).result(DEADLINE_S)
    thread.close()


def test_a_thread_ends_with_its_owner():
    thread, owner = CallThread("test"), Owner()
    thread.end_with(owner)
    assert thread.submit(int).result(DEADLINE_S) == 0
    del owner
    gc.collect()
    thread._thread.join(DEADLINE_S)
    assert not thread._thread.is_alive()
    thread.close()
