from pathlib import Path

import pytest
from torch import nn

import paceline
from paceline.runs.folder import make_folder, remove_unused


@pytest.mark.parametrize("verb", [paceline.train, paceline.rehearse])
def test_a_module_in_place_of_a_recipe_is_refused_in_one_line(verb):
    with pytest.raises(
        paceline.InvalidInput, match="model: a Sequential cannot be given to"
    ) as said:
        verb(nn.Sequential(nn.Linear(2, 2)))
    assert "paceline.Recipe(" in str(said.value)
    assert "\n" not in str(said.value)


def test_a_folder_with_nothing_but_settings_is_removed_and_no_other(tmp_path: Path):
    for name, files in (("refused", ["run.toml"]), ("bare", []), ("kept", ["run.toml", "x.json"])):
        folder = make_folder(tmp_path, name)
        for file in files:
            (folder / file).touch()
        remove_unused(folder)
        assert folder.exists() == (name == "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2
