"""The blocks of steps of a profile: twice as many where plain steps are restless."""

from collections.abc import Iterable
from itertools import cycle

import pytest
from torch import nn

from groups import group_of
from paceline.record.recorder import Recorder
from paceline.studies.profile.profiled_steps import measure
from ticking import Ticking

RECORDED_S = 10.0


class Steps:
    """Stands in for a training: plain steps take these seconds in turns, recorded ones others."""

    def __init__(self, clock: Ticking, plain_s: Iterable[float]) -> None:
        self._clock, self._plain_s = clock, cycle(plain_s)
        self._is_recorded, self._number = False, 0
        self.model, self.replica = nn.Linear(1, 1), self

    def record(self, recorder: Recorder | None) -> None:
        self._is_recorded = recorder is not None

    def step(self, recorder: Recorder) -> None:
        # Recorded ones differ from each other in any case.
        self._number += 1
        recorded_s = RECORDED_S * (1 + self._number % 2)
        self._clock.now += recorded_s if self._is_recorded else next(self._plain_s)
        recorder.end_step()


@pytest.mark.parametrize(
    ("plain_s", "times", "unrest"), [((1.0,), 1, 0.0), ((1.0, 1.0, 2.0), 2, 0.5)]
)
def test_restless_plain_steps_have_both_kinds_taken_twice(
    plain_s: tuple[float, ...], times: int, unrest: float
) -> None:
    clock = Ticking()
    recorder = Recorder(clock, "cpu0", 0)
    found = measure(Steps(clock, plain_s), recorder, clock, group_of(), 20)
    assert found.unrest == pytest.approx(unrest)
    for blocks in (found.plain, found.recorded):
        assert [len(block) for block in blocks] == [4] * 5 * times
    assert len(found.spans) == len(found.timelines) == 5 * times
    assert {seconds for block in found.plain for seconds in block} == set(plain_s)
    assert min(min(block) for block in found.recorded) == RECORDED_S
