"""In which order the repetitions of a study's runs are done."""

from pathlib import Path
from typing import cast

from paceline.records.scale import ScaleCell, ScaleSettings
from paceline.studies.scale.study import ScalingStudy, do_runs
from paceline.studies.scale.study_runs import Crashed, StudyRun, runs
from scale_cells import cell


class Turns:
    """A study whose runs take no time and say in which order they are done."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int, int]] = []

    def repeats(self, run: StudyRun) -> int:
        return 3

    def repetition(self, run: StudyRun, number: int, folder: Path) -> dict:
        self.order.append((run.method, run.batch_size, number))
        if (run.method, number) == ("tree", 2):
            raise Crashed("gone")
        return {"measured": number}

    def cells(self, run: StudyRun, steps: list[dict]) -> list[ScaleCell]:
        assert [one["measured"] for one in steps] == [1, 2, 3]
        return [cell(method=run.method, batch=run.batch_size)]


def test_repetitions_of_methods_take_turns_and_one_that_fails_is_left_out(tmp_path):
    settings = ScaleSettings(
        model="lenet5", workers=(1,), batch_size=(16, 32), strategy=("allreduce", "tree", "host")
    )
    turns = Turns()
    study = cast("ScalingStudy", turns)
    done = do_runs(study, list(runs(settings)), tmp_path, lambda run: None)
    ended = [(run.method, run.batch_size, cells[0].error) for run, cells, _ in done]
    first = [
        *(("allreduce", 1), ("tree", 1), ("host", 1)),
        *(("tree", 2), ("host", 2), ("allreduce", 2)),
        *(("host", 3), ("allreduce", 3)),
    ]
    assert turns.order == [(method, size, n) for size in (16, 32) for method, n in first]
    assert ended == [
        (method, size, error)
        for size in (16, 32)
        for method, error in (("tree", "gone"), ("host", None), ("allreduce", None))
    ]
