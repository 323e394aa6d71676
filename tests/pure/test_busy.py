import pytest

from paceline.core.losses import BUSY, busy_warning, unrest_between
from paceline.records.scale import ScaleResult, unrest_of
from paceline.studies.scale.study_terminal import sentences
from scale_cells import cell, failed


def test_unrest_is_half_the_distance_of_the_quartiles_over_the_median():
    assert unrest_between(8.0, 10.0, 13.0) == pytest.approx(0.25)
    assert unrest_between(10.0, 10.0, 10.0) == 0.0


def test_only_a_busy_machine_is_doubted():
    assert busy_warning(BUSY, "steps", "so") is None
    said = busy_warning(0.25, "repetitions", "what follows is as uncertain")
    assert said == (
        "this machine is busy with other programs: repetitions lie ±25 % around their median, "
        "and what follows is as uncertain"
    )


def test_a_study_whose_repetitions_differ_says_so_first():
    quiet, busy = cell(spread=(9.9, 10.1)), cell("host", spread=(8.0, 13.0))
    assert unrest_of([quiet, failed(), busy]) == pytest.approx(0.25)
    told, silent = (
        sentences(ScaleResult.model_construct(cells=cells, insights=()))
        for cells in ((quiet, busy), (quiet,))
    )
    assert "busy with other programs" in told[0]
    assert silent == []


def test_predictions_have_no_unrest():
    assert unrest_of([cell(kind="predicted", spread=(1.0, 20.0))]) == 0.0
