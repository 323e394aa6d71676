"""paceline.plan, as a Python program calls it."""

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.records.machine_file import read_machine
from refusals import refused

MACHINE = Path(__file__).parents[2] / "machines" / "two-core-epyc.toml"


def test_a_module_of_the_programs_own_is_planned_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    before = torch.get_rng_state()
    forecasts = paceline.plan(model, MACHINE, batch_size=33, input_shape=(1, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)
    rates = [one.samples_per_s for one in forecasts]
    assert rates == sorted(rates, reverse=True)
    plain = [one for one in forecasts if (one.strategy, one.codec) == ("allreduce", None)]
    by_workers = {one.workers: one for one in plain}
    num_parameters = 64 * 100 + 100 + 100 * 10 + 10
    assert by_workers[2].wire_nbytes == 2 * 4 * num_parameters
    # 33 samples are 17 and 16: the step takes as long as with 34, but 33 are done.
    assert by_workers[2].samples_per_s == pytest.approx(33 / by_workers[2].step_s)
    even = paceline.plan(model, MACHINE, batch_size=34, input_shape=(1, 8, 8), workers=2)
    (of_even,) = (one for one in even if (one.strategy, one.codec) == ("allreduce", None))
    assert by_workers[2].step_s == of_even.step_s
    assert by_workers[1].samples_per_s == pytest.approx(33 / by_workers[1].step_s)


def test_a_machine_may_be_a_file_or_an_object() -> None:
    from_file = paceline.plan("lenet5", str(MACHINE))
    from_object = paceline.plan("lenet5", read_machine(MACHINE))
    assert [one.step_s for one in from_file] == [one.step_s for one in from_object]


def test_no_more_workers_are_planned_for_than_samples() -> None:
    assert [one.workers for one in paceline.plan("lenet5", MACHINE, batch_size=1)] == [1]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"workers": 3}, "workers"),
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (1, 0, 32)}, "input_shape"),
        ({"machine": "none.toml"}, "none.toml"),
        ({"model": nn.Linear(3, 3)}, "input_shape"),
        ({"model": nn.ReLU(), "input_shape": (3,)}, "ReLU"),
        ({"model": "lenet6"}, "model"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(arguments, field: str) -> None:
    with refused(field):
        paceline.plan(**{"model": "lenet5", "machine": MACHINE} | arguments)
