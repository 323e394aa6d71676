"""Steps after which a single process saves a checkpoint."""

from pathlib import Path

import pytest
import torch

from paceline.core.errors import Interrupted
from paceline.core.settings import TrainSettings
from paceline.exchange.checkpoints import Saver, State
from paceline.links.group import Group
from paceline.links.interruption import Interruption


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
