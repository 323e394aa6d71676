"""Ranks agree on their last step, and name a rank that was signalled alone."""

import signal
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from absent_ranks import group_of
from paceline.links import interruption as module
from paceline.links.interruption import Interruption, StopAgreement


@pytest.mark.parametrize(
    ("signalled", "named"),
    [([0], "worker 0 (process 1)"), ([1], "worker 1 (process 2)"), ([0, 1], None)],
)
def test_all_ranks_stop_after_the_same_step_whoever_is_signalled(monkeypatch, signalled, named):
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    monkeypatch.setattr(module, "_MARGIN_S", 0.0)
    store, asked = HashStore(), [Interruption(), Interruption()]
    ranks = [
        StopAgreement(replace(group_of(rank, 2), store=store), one, 0)
        for rank, one in enumerate(asked)
    ]
    stopped: dict[int, int] = {}
    for step in range(1, 20):
        if step == 5:
            for rank in signalled:
                asked[rank].number = signal.SIGINT
        for rank, agreement in enumerate(ranks):
            if rank not in stopped and agreement.after(step):
                stopped[rank] = step
    assert stopped[0] == stopped[1] > 5
    assert [one.number for one in asked] == [signal.SIGINT] * 2
    assert [one.worker for one in asked] == [named] * 2
