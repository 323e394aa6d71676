"""Which exchange is taken from the steps of each, on one rank with a clock that is set by hand."""

import pytest
import torch

from paceline.core.errors import InvalidInput
from paceline.exchange.replica import Method
from paceline.exchange.trials import Trials
from paceline.links.rendezvous import joined

METHODS = [Method("allreduce"), Method("tree"), Method("host")]


class Watch:
    """Marks are seconds, which whoever holds it moves on."""

    def __init__(self):
        self.now = 100.0

    def mark(self):
        return self.now

    def seconds(self, marks):
        return list(marks)


def train(trials, watch, takes, steps=100):
    """Take steps as a replica does: before each forward pass it asks whether to go on."""
    used = []
    for step in range(steps):
        if trials.due:
            trials.go_on(joined(torch.device("cpu")))
        used.append(trials.method.name)
        watch.now += takes(trials.method.name, step)
        trials.exchanged()
    return used


@pytest.mark.parametrize("fastest", ["allreduce", "tree", "host"])
def test_the_fastest_is_kept_after_a_few_steps_of_each(fastest):
    watch = Watch()
    trials = Trials(METHODS, watch)
    used = train(trials, watch, lambda name, _: 0.01 if name == fastest else 0.02)
    assert trials.settled
    assert used[-1] == fastest
    assert [used.count(name) >= 7 for name in ("allreduce", "tree", "host")] == [True] * 3
    assert used[40:] == [fastest] * 60
    assert trials.why().startswith(f"{fastest}: the fastest of those measured, by the step: ")
    assert f"{fastest} 10 ms" in trials.why()


def test_the_first_steps_and_one_that_was_held_up_do_not_count():
    """Tree's buckets take long at first, and in one step a checkpoint is written."""
    watch = Watch()
    trials = Trials(METHODS, watch)
    own = {"allreduce": 0, "tree": 0, "host": 0}

    def takes(name, _):
        own[name] += 1
        if name == "tree":
            return 5.0 if own[name] <= 5 or own[name] == 9 else 0.01
        return 0.02

    train(trials, watch, takes)
    assert trials.method.name == "tree"


def test_one_that_cannot_be_used_is_left_out_and_named():
    watch = Watch()
    trials = Trials(METHODS, watch)
    train(trials, watch, lambda name, _: 0.02, steps=13)
    trials.go_on(joined(torch.device("cpu")))
    assert trials.method.name == "tree"
    trials.fail(InvalidInput("no memory"))
    assert trials.method.name == "host"
    assert trials.why() == "host: being tried; allreduce 20 ms; tree cannot be used: no memory"
    used = train(trials, watch, lambda name, _: 0.03, steps=30)
    assert used[-1] == "allreduce"


def test_a_figure_of_other_chunks_is_not_that_of_those_in_use():
    """Host was measured with the chunks that were predicted to be best; its search goes on."""
    watch = Watch()
    trials = Trials(METHODS, watch)
    chunks = {"allreduce": None, "tree": None, "host": 8}
    for name, chunk in chunks.items():
        for _ in range(13):
            watch.now += 0.01 if name == "host" else 0.02
            trials.exchanged()
        trials.go_on(joined(torch.device("cpu")), chunk)
    figures = "allreduce 20 ms; host 10 ms in chunks of 8 layers; tree 20 ms"
    reason = f"host: the fastest of those measured, by the step: {figures}"
    assert trials.why(8, is_searched=True) == reason
    tried = trials.why(4, is_searched=True)
    assert tried == f"{reason}; now trying chunks of 4 layers, of which the figure above is not"
    found = trials.why(1)
    assert found == f"{reason}; since then in chunks of 1 layer, of which the figure above is not"
