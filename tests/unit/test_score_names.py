"""What the share of right samples is called: by one place, wherever it is shown."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from command_line import write_run
from paceline.core.outcome import Epoch
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Timeline
from paceline.data.dataset import Dataset, TensorSamples
from paceline.recipes.named import recipe_of_data
from paceline.recipes.recipe import Recipe, built
from paceline.record.trace import write_trace
from paceline.records.result import RunResult, read_run
from paceline.report import write_report
from paceline.report.terminal import epoch_line, result_tables
from refusals import refused

NAMES = pytest.mark.parametrize(
    ("score", "other"), [("accuracy", "precision@1"), ("precision@1", "accuracy")]
)


def uneven(score: str) -> RunResult:
    return RunResult(
        origin="measured",
        id="run",
        settings=TrainSettings(model="mlp", strategy="hogbatch"),
        strategy="hogbatch",
        machine={},
        epochs=(Epoch(number=0, train_loss=2, test_loss=1, score=0.5, seconds=3),),
        accuracy=0.5,
        score=score,
        trained_s=3.0,
        samples_per_s=10.0,
    )


@NAMES
def test_lines_in_a_terminal_say_which(tmp_path: Path, score: str, other: str) -> None:
    in_step = read_run(write_run(tmp_path / "run", 1.0, 1.0)).model_copy(update={"score": score})
    lines = [epoch_line(Epoch(0, 2.0, 1.0, 0.5, 3.0), 4, score)]
    for result in (in_step, uneven(score)):
        *_, summary = result_tables(result, "folder")
        lines.append(str(summary).splitlines()[0])
    for line in lines:
        assert score in line
        assert other not in line
    assert lines[0].endswith(f"test loss 1.0000, {score} 50.00%")


@NAMES
def test_reports_say_which(tmp_path: Path, score: str, other: str) -> None:
    folder = write_run(tmp_path / "run", 1.0, 1.0)
    result = read_run(folder).model_copy(update={"score": score})
    (folder / "result.json").write_text(result.model_dump_json())
    both = tmp_path / "uneven"
    both.mkdir()
    (both / "result.json").write_text(uneven(score).model_dump_json())
    write_trace(both / "trace.json", (Timeline([], "measured"),))
    for one in (folder, both):
        page = write_report(one).read_text()
        assert page.lower().count(f"test {score}") >= 2
        assert f"test {other}" not in page.lower()


def test_a_result_of_before_is_an_accuracy(tmp_path: Path) -> None:
    text = uneven("accuracy").model_dump_json()
    assert '"score":"accuracy",' in text
    (tmp_path / "result.json").write_text(text.replace('"score":"accuracy",', ""))
    assert read_run(tmp_path).score == "accuracy"


def data(targets: torch.Tensor) -> Dataset:
    samples = TensorSamples(torch.zeros(2, 4), targets)
    return Dataset("toy", samples, samples, 3, (4,))


def of(model: nn.Module, targets: torch.Tensor) -> Recipe:
    return replace(recipe_of_data(data(targets)), model=lambda: model, name="net")


CLASSES, LABELS = torch.tensor([0, 2]), torch.tensor([[True, False, True]] * 2)


@pytest.mark.parametrize(("targets", "outputs"), [(CLASSES, 3), (CLASSES, 5), (LABELS, 3)])
def test_enough_outputs_are_taken(targets: torch.Tensor, outputs: int) -> None:
    built(of(nn.Linear(4, outputs), targets), 0)


@pytest.mark.parametrize(
    "targets_and_model",
    [
        (CLASSES, nn.Linear(4, 2)),
        (LABELS, nn.Linear(4, 2)),
        (LABELS, nn.Linear(4, 4)),
        (CLASSES, nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))),  # no table of scores
    ],
)
def test_too_few_outputs_or_for_labels_too_many_are_refused(targets_and_model) -> None:
    targets, model = targets_and_model
    with refused("model net"):
        built(of(model, targets), 0)
