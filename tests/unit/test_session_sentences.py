"""What a plan of this machine says beside its table: where it is right, and where it were wrong."""

import logging
import re
import shlex
from dataclasses import replace

import pytest
import torch

import measured_runs
from paceline.core.losses import BUSY
from paceline.core.settings import TrainSettings
from paceline.links.group import Group
from paceline.runs.restarts import RunRequest
from paceline.runs.session import go_through


def plan(strategy: str, *, rank: int = 0, model: str = "net") -> None:
    settings = TrainSettings(model=model, strategy=f"measured_runs:{strategy}")
    group = replace(Group.alone(torch.device("cpu"), 5.0), rank=rank)
    go_through(RunRequest(verb="plan", settings=settings, run_id="planned"), group)


def test_a_restless_profile_is_said_with_its_unrest(monkeypatch, caplog, capsys):
    """The range is wider by what is beyond the unrest of a quiet machine, 5 %."""
    monkeypatch.setattr(measured_runs, "unrest", 0.25)
    plan("HUB")
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.message == (
        "this machine is busy with other programs: half of the steps of the profile lie ±25 % "
        "around their median, and the ranges of predictions are wider for it"
    )
    assert "±33 %" in capsys.readouterr().out
    caplog.clear()
    plan("HUB", rank=1)  # which need not say it again
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("unrest", [0.0, BUSY])
def test_nothing_is_said_of_a_quiet_machine(unrest, monkeypatch, caplog, capsys):
    monkeypatch.setattr(measured_runs, "unrest", unrest)
    plan("HUB")
    assert "busy" not in caplog.text
    assert f"±{13 + max(0, 100 * unrest - 5):.0f} %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ("RANKS", ""),
        ("HUB_OF_RANKS", " --strategy measured_runs:HUB_OF_RANKS"),
        ("HUB", None),  # which starts its workers itself
    ],
)
def test_two_machines_are_for_strategies_that_a_launcher_can_start(strategy, named, capsys):
    plan(strategy)
    last = capsys.readouterr().out.splitlines()[-1]
    if named is None:
        assert "two machines" not in last
    else:
        assert last == (
            f"two machines: `paceline launch net{named} --workers 2 --nodes 2 --master ADDRESS "
            "--emit torchrun` prints a command for each"
        )


def test_the_command_for_two_machines_prints_one_for_each(line, capsys):
    plan("HUB_OF_RANKS", model="lenet5")
    (command,) = re.findall("two machines: `paceline (.*)` prints", capsys.readouterr().out)
    line(*shlex.split(command))
    assert line.code == 0, line.err
    commands = [one for one in line.out.splitlines() if one.startswith("torchrun ")]
    assert len(commands) == 2
    for rank, one in enumerate(commands):
        assert f" --node-rank {rank} --master-addr ADDRESS " in one
        assert " train lenet5 --strategy measured_runs:HUB_OF_RANKS --workers 2 " in one
