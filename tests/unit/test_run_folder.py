"""The folder of a run: what is left of it where a run is refused or fails."""

import shutil
from pathlib import Path

import pytest
from torch import nn

import paceline
from paceline.core.settings import TrainSettings
from paceline.runs.folder import make_folder, remove_unused, run_folder
from refusals import refused


@pytest.mark.parametrize("verb", [paceline.train, paceline.rehearse])
def test_a_module_in_place_of_a_recipe_is_refused(verb):
    with refused("model"):
        verb(nn.Sequential(nn.Linear(2, 2)))


def test_a_folder_with_nothing_but_settings_is_removed_and_no_other(tmp_path: Path):
    for name, files in (("refused", ["run.toml"]), ("bare", []), ("kept", ["run.toml", "x.json"])):
        folder = make_folder(tmp_path, name)
        for file in files:
            (folder / file).touch()
        remove_unused(folder)
        assert folder.exists() == (name == "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def ended(output: Path, error: BaseException, before=lambda folder: None, **how) -> Path:
    """The folder of a run that has done something `before` it ends with the error."""

    def run() -> None:
        with run_folder(output, "run", TrainSettings(model="lenet5"), **how) as folder:
            assert (folder / "run.toml").is_file()
            before(folder)
            raise error

    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error
    return output / "run"


@pytest.mark.parametrize(
    "error", [paceline.InvalidInput("a", "no"), RuntimeError("bang"), SystemExit()]
)
def test_a_run_that_fails_before_its_first_result_leaves_no_folder(tmp_path: Path, error):
    assert not ended(tmp_path, error).exists()


def test_what_a_run_has_written_outlives_its_failure(tmp_path: Path):
    folder = ended(tmp_path, RuntimeError(), lambda folder: (folder / "checkpoints").mkdir())
    assert {path.name for path in folder.iterdir()} == {"run.toml", "checkpoints"}


def test_the_folder_of_a_run_that_goes_on_stays(tmp_path: Path):
    make_folder(tmp_path, "run")
    assert (ended(tmp_path, RuntimeError(), exists=True) / "run.toml").is_file()


def test_a_folder_that_is_gone_does_not_hide_the_error(tmp_path: Path):
    ended(tmp_path, RuntimeError(), shutil.rmtree)
