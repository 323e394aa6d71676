"""Unequal batches on real ranks, against one process on the whole batch."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from launched import output
from paceline import DataParallel
from paceline.core.errors import InvalidInput
from paceline.data import BalancedSampler

pytestmark = pytest.mark.slow

EXCHANGES = ("allreduce", "host")
EXACT = [
    "gradients_float64",
    "gradients_of_an_exchange_of_its_own_choice",
    "micro_batches",
    "two_outputs_and_a_decay_in_the_loss",
]
OF_HOST = "evaluation_on_one_rank_alone"
FLOAT32 = "gradients_float32"
REFUSED = {
    "samplers_that_differ": "InvalidInput: sampler: samples, batch size, seed and most must",
    "a_sampler_of_other_ranks": "InvalidInput: sampler: made for rank 0 of ",
    "nothing_to_count": "InvalidInput: balance: the module's first tensor has no rows",
}
FOLLOWED = "shares_follow_a_slow_rank_in_the_middle_of_epochs"
UNHELPFUL = "a_rank_that_does_not_help_gets_no_samples"
OTHERS = ["batch_norm_without_samples", FOLLOWED, "a_lost_rank_is_named", *REFUSED]
OF_TWO = [*EXACT, OF_HOST, FLOAT32, *OTHERS]
OF_THREE = [*EXACT, OF_HOST, FLOAT32, UNHELPFUL]
Found = dict[tuple[str, str], list]


def run(folder: Path, num_ranks: int, names: list[str]) -> Found:
    out = output(folder, num_ranks, "balance.py", ",".join(EXCHANGES), ",".join(names))
    rows = map(json.loads, out.splitlines())
    return {(exchange, name): outcomes for exchange, name, outcomes in rows}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> Found:
    return run(tmp_path_factory.mktemp("two"), 2, OF_TWO)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory) -> Found:
    return run(tmp_path_factory.mktemp("three"), 3, OF_THREE)


@pytest.fixture(params=["of_two", "of_three"])
def found(request) -> Found:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("exchange", "name"),
    [*((exchange, name) for exchange in EXCHANGES for name in EXACT), ("host", OF_HOST)],
)
def test_gradients_are_those_of_one_process(found: Found, exchange: str, name: str):
    outcomes = found[exchange, name]
    assert not [one["error"] for one in outcomes if "error" in one]
    assert max(one["worst"] for one in outcomes) <= 1e-12
    assert len({one["bits"] for one in outcomes}) == 1


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_float32_gradients_are_those_of_one_process(found: Found, exchange: str):
    outcomes = found[exchange, FLOAT32]
    assert max(one["worst"] for one in outcomes) <= 1e-6
    assert len({one["bits"] for one in outcomes}) == 1


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_samples_spoil_no_running_statistics(of_two: Found, exchange: str):
    outcomes = of_two[exchange, "batch_norm_without_samples"]
    assert all(one["finite"] for one in outcomes), outcomes
    assert len({one["bits"] for one in outcomes}) == 1


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_shares_follow_a_slow_rank(of_two: Found, exchange: str):
    """Six times slower; but whatever else the machine does may slow the others down."""
    outcomes = of_two[exchange, FOLLOWED]
    assert not [one["error"] for one in outcomes if "error" in one]
    assert max(one["worst"] for one in outcomes) <= 1e-10
    assert len({one["bits"] for one in outcomes}) == 1
    shares, *others = [one["shares"] for one in outcomes]
    assert all(other == shares for other in others)
    assert sum(shares) == 240
    # Of all epochs: the last shares alone may be of a moment in which another rank got no core.
    first, *_, slow = [sum(map(sum, one["used"])) for one in outcomes]
    assert first > slow
    used = outcomes[-1]["used"]
    assert len({number for epoch in used for number in epoch}) > 2  # it has changed on the way
    for epoch in zip(*(one["used"] for one in outcomes), strict=True):
        assert sum(map(sum, epoch)) == 1210


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_does_not_help_is_refused_and_trains_along(of_three: Found, exchange: str):
    outcomes = of_three[exchange, UNHELPFUL]
    assert not [one["error"] for one in outcomes if "error" in one]
    assert max(one["worst"] for one in outcomes) <= 1e-10
    assert len({one["bits"] for one in outcomes}) == 1
    assert outcomes[0]["shares"][-1] == 0
    assert set(outcomes[-1]["used"][-1]) == {0}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(of_two: Found, exchange: str, name: str):
    for outcome in of_two[exchange, name]:
        assert outcome["error"].startswith(REFUSED[name])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nobody_waits_for_ever_for_a_number_of_samples(of_two: Found, exchange: str):
    *others, last = of_two[exchange, "a_lost_rank_is_named"]
    assert last is None
    for outcome in others:
        assert outcome["error"].startswith("WorkerLost: ")


def test_uneven_workers_are_rehearsed_with_batches_that_follow_their_speeds(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 900), nn.ReLU(), nn.Linear(900, 5))\n"
    )
    options = ("--stretch", "1,8", "--strategy", "host", "--steps", "6", "--batch-size", "600")
    shape = ("--input-shape", "1x8x8", "--balance", "auto", "--json")
    done = paceline("rehearse", "mine:net", *options, *shape)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["devices"] == "stretched 1, 8 times"
    assert result["settings"]["stretch"] == [1.0, 8.0]
    fast, slow = result["shares"]
    assert fast + slow == 600
    assert fast > slow  # other programs of the machine may slow one of the two down
    assert result["faults"] == []


def test_a_run_balances_its_batches_and_learns(paceline):
    options = ("--balance", "auto", "--force", "--epochs", "3", "--profile-s", "0.5", "--json")
    done = paceline("train", "lenet5", "--strategy", "host", *options)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert sum(result["shares"]) == result["settings"]["batch_size"] == 64
    assert result["accuracy"] > 0.8
    assert result["faults"] == []


def test_a_run_without_gain_is_refused_with_the_reason(paceline, tmp_path):
    """Of a model that computes four samples, and exchanges 17 MB."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(num_classes=10):\n"
        "    wide = nn.Linear(2000, 2000)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), wide, nn.Linear(2000, 10))\n"
    )
    options = ("--epochs", "1", "--profile-s", "0.5", "--batch-size", "4", "--balance", "auto")
    done = paceline("train", "mine:net", *options)
    assert done.code == 2, done.out + done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert "would slow the others down" in line
    assert line.endswith("(--force has all take part)")


def test_a_process_alone_may_balance_too():
    parallel = DataParallel(nn.Linear(3, 2), balance="auto")
    sampler = parallel.balance(BalancedSampler(40, 4, 0, 1))
    for batch in sampler:
        parallel(torch.ones(len(batch), 3)).sum().backward()
    assert torch.equal(parallel.module.weight.grad, torch.full((2, 3), 40.0))
    assert parallel.statistics().shares == (4,)
    assert torch.equal(parallel.eval()(torch.ones(1, 3)), parallel.module(torch.ones(1, 3)))


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"balance": "magic"}, None, "balance: must be 'auto' or None, not 'magic'"),
        ({}, lambda model: model.samples(3), "balance: batches are equal here"),
        (
            {"balance": "auto"},
            lambda model: model.samples(-1),
            "samples: must be 0 or more, not -1",
        ),
        (
            {"balance": "auto"},
            lambda model: (
                torch.utils.checkpoint.checkpoint(
                    model, torch.ones(2, 3, requires_grad=True), use_reentrant=True
                )
                .sum()
                .backward()
            ),
            "balance: a checkpoint around the whole model",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(options, call, message):
    with pytest.raises(InvalidInput, match=message):
        call(DataParallel(nn.Linear(3, 2), **options))
