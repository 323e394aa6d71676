"""Steps after which ranks save checkpoints, and stop."""

import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import HashStore

from absent_ranks import group_of
from paceline.core.errors import Interrupted
from paceline.core.settings import TrainSettings
from paceline.exchange import checkpoints
from paceline.exchange.checkpoints import Saver, State
from paceline.links import interruption
from paceline.links.group import Group
from paceline.links.interruption import Interruption, StopAgreement
from ticking import Sleeping


@pytest.mark.parametrize(
    ("every", "expected"), [("10", [12, 31, 40]), ("1h", []), ("never", [])], ids=str
)
def test_a_state_is_saved_once_for_each_interval_that_has_passed(tmp_path: Path, every, expected):
    """Also if steps are skipped, and on interruption."""
    settings, interruption = TrainSettings(model="mlp", checkpoint_every=every), Interruption()
    group = Group.alone(torch.device("cpu"), 1.0)
    saver, saved = Saver(group, tmp_path, settings, interruption, 0), list[int]()

    def gather(num_steps: int) -> State:
        saved.append(num_steps)
        return State({}, {})

    for num_steps in (0, 3, 9, 9, 12, 12, 19, 31, 40, 41):
        saver.after(num_steps, gather)
    assert saved == expected
    interruption.number = 2
    with pytest.raises(Interrupted):
        saver.after(41, gather)
    saver.close()
    assert saved == [*expected, 41]


class Rank(Group):
    """A rank of two; rank 1 runs after rank 0, and reads what rank 0 has gathered."""

    sent: ClassVar[list[Any]] = []

    def gather(self, value: Any) -> list[Any]:
        if self.rank == 0:
            self.sent.append(value)
        return [value if self.rank == 0 else self.sent.pop(0)]


def test_all_ranks_save_by_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Steps take 0.1 s, and later 0.2 s; the clock of rank 1 runs four times as fast."""
    settings, found = TrainSettings(model="mlp", checkpoint_every="5s"), []
    for rank in range(2):
        clock, saved = Sleeping(), list[int]()
        monkeypatch.setattr(checkpoints, "time", clock)
        saver = Saver(group_of(rank, 2, kind=Rank), None, settings, Interruption(), 0)
        for num_steps in range(1, 301):
            clock.sleep((0.1 if num_steps <= 100 else 0.2) * 4**rank)
            saver.after(num_steps, lambda step, saved=saved: saved.append(step) or State({}, {}))
        found.append((saved, len(Rank.sent)))
    (saved, num_meetings), (others, num_left) = found
    assert saved == others
    assert num_left == 0
    assert 40 <= num_meetings <= 60  # in 50 s
    seconds = [0.1 * min(step, 100) + 0.2 * max(0, step - 100) for step in [0, *saved]]
    assert all(5 <= end - start < 7 for start, end in pairwise(seconds))


@pytest.mark.parametrize(
    ("signalled", "named"),
    [([0], "worker 0 (process 1)"), ([1], "worker 1 (process 2)"), ([0, 1], None)],
)
def test_all_ranks_stop_after_the_same_step_whoever_is_signalled(monkeypatch, signalled, named):
    """A rank that was signalled alone is named."""
    monkeypatch.setattr(interruption, "_POLL_S", 0.0)
    monkeypatch.setattr(interruption, "_MARGIN_S", 0.0)
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
