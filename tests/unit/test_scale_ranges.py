"""The ranges of predicted cells: from the planner's forecasts to what a study shows of them."""

import json

import pytest
from rich.console import Console

from command_line import MACHINE
from findings import EXCHANGES, run
from paceline.core.timeline import Origin
from paceline.planner import forecast
from paceline.records.machine_file import read_machine
from paceline.records.scale import Point, ScaleResult, ScaleSettings
from paceline.strategies import find_exchange
from paceline.studies.scale.study import study_model
from paceline.studies.scale.study_runs import RunStep, cell, steps_of
from paceline.studies.scale.study_terminal import cells_table, sentences
from plan_rows import plan_row
from scale_cells import cell as some_cell

POINT = Point("tree", 2, 16, "strong")
PARTS = {"forward": 1.0, "backward": 2.0}
MEANT = "the range beside a prediction is meant to hold the measured epoch in 9 of 10 cases"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_spread_of_a_predicted_cell_is_the_range_of_its_forecast(line, workers):
    line(
        *("scale", "lenet5", "--machine", MACHINE, "--predict", "--json", "--batch-size", "16"),
        *("--workers", workers, "--strategy", "allreduce", "--samples", 160),
    )
    (found,) = json.loads(line.out)["cells"]
    settings = ScaleSettings(model="lenet5", predict=True, machine=str(MACHINE))
    workload = study_model(settings).workload(16 // workers)
    strategy = find_exchange("allreduce")
    config = strategy.config(workers=workers)
    plan = forecast(workload, read_machine(MACHINE), strategy, config, 16)
    assert plan.range_share >= 0.07
    assert found["epoch_s"] == pytest.approx(10 * plan.step_s)
    assert found["spread"] == pytest.approx([10 * one for one in plan.range_s])


def test_a_run_carries_the_range_of_its_own_prediction():
    own, other = plan_row(step_s=20, range_share=0.2), plan_row(strategy="tree", range_share=0.6)
    result = run(EXCHANGES, plans=(own, other), predicted_step_s=20, step_s=22)
    found = steps_of(result)
    assert found[Origin.PREDICTED].range_s == pytest.approx((16, 24))
    assert found[Origin.MEASURED].range_s == (22, 22)


def test_predictions_of_several_runs_span_the_quartiles_of_their_ranges_ends():
    shares = {1.0: 0.1, 1.2: 0.2, 1.1: 0.3}
    steps = [RunStep(seconds, PARTS, 100, within) for seconds, within in shares.items()]
    found = cell(POINT, Origin.PREDICTED, steps, 1600, 1e9)
    assert found.epoch_s == pytest.approx(110)
    # Lower ends of 0.77, 0.9 and 0.96 s, upper ends of 1.1, 1.43 and 1.44 s.
    assert found.spread == pytest.approx((83.5, 143.5))


def test_no_epoch_of_a_restless_profile_is_predicted_to_take_less_than_nothing():
    found = cell(POINT, Origin.PREDICTED, [RunStep(1.0, PARTS, 100, 1.5)], 1600, 1e9)
    assert found.spread == (0.0, 250.0)


@pytest.mark.parametrize(
    ("kinds", "head", "told"),
    [
        (["predicted"], "range", [MEANT]),
        (
            ["measured", "predicted"],
            "range",
            [f"{MEANT}; beside other epochs stand the quartiles of their repetitions"],
        ),
        (["measured"], "quartiles", []),
    ],
)
def test_what_stands_beside_epochs_is_named(capsys, kinds, head, told):
    cells = [some_cell(kind=kind, spread=(9.0, 11.3)) for kind in kinds]
    Console(width=80).print(cells_table(cells))
    _, heads, *rows = capsys.readouterr().out.splitlines()
    assert head in heads.split()
    assert all("9.00-11.3" in row for row in rows)
    assert sentences(ScaleResult.model_construct(cells=cells, insights=())) == told
