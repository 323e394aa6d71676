"""What is known of the cost in loss of rounds of inner steps, and where it is said."""

from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter, ValidationError

from boxes import box, chain, link
from paceline.core.errors import InvalidInput
from paceline.planner import search
from paceline.records.result import PlanRow, RankingRows
from paceline.report.planned import of_plan
from paceline.report.terminal import console, show_plans
from paceline.strategies import find_exchange
from paceline.strategies.local import STRATEGY
from paceline.strategies.local.config import Local
from paceline.strategies.local.loss_table import LossRow, caveat, described, loss_rows

ROW = LossRow(
    sync_every=100,
    workers=2,
    bits=8,
    difference=0.012,
    spread=0.004,
    seeds=3,
    model="gpt-10m",
    tokens=20_000_000,
)
EIGHT_BITS = Local(sync_every=100, codec="dynamic8")


def test_the_table_of_the_package_is_valid_and_nothing_is_promised_without_a_row():
    assert all(isinstance(row, LossRow) for row in loss_rows())
    unheard = Local(workers=64, sync_every=7, codec="onebit")
    assert caveat(unheard) == (
        "not the same training: nothing is known of the cost in loss of rounds of 7 steps on 64 "
        "workers with 1 bit"
    )


def test_what_was_measured_nearby_is_a_range_over_all_seeds():
    assert described(EIGHT_BITS, [ROW]) == (
        "not the same training: near rounds of 100 steps on 2 workers with 8 bits the loss was "
        "+0.008 to +0.016 beside that of synchronous training, which is no promise for another "
        "model (gpt-10m, rounds of 100, 2 workers, 2e+07 tokens, 3 seeds)"
    )
    better = replace(ROW, sync_every=50, difference=-0.01, spread=0.002)
    assert "-0.012 to +0.016" in described(EIGHT_BITS, [ROW, better])


@pytest.mark.parametrize(
    ("row", "is_near"),
    [
        ({"sync_every": 200}, True),
        ({"sync_every": 50, "workers": 4}, True),
        ({"workers": 1}, True),
        ({"sync_every": 201}, False),
        ({"sync_every": 49}, False),
        ({"workers": 5}, False),
        ({"bits": 4}, False),
        ({"outer_learning_rate": 1.0}, False),  # another outer step
        ({"outer_momentum": 0.0}, False),
        ({"bits": 32}, False),
    ],
)
def test_rows_are_near_up_to_twice_or_half_with_as_many_bits(row, is_near):
    sentence = described(EIGHT_BITS, [replace(ROW, **row)])
    assert ("nothing is known" not in sentence) is is_near


def test_without_a_codec_values_have_32_bits_and_auto_has_those_of_what_it_encodes_with():
    assert "nothing" not in described(Local(), [replace(ROW, bits=32)])
    # Another outer step costs something else.
    assert "nothing" in described(Local(outer_learning_rate=1), [replace(ROW, bits=32)])
    assert "nothing" in described(Local(outer_momentum=0), [replace(ROW, bits=32)])
    assert "nothing" not in described(Local(codec="auto"), [ROW])
    with pytest.raises(InvalidInput, match="nobody knows beforehand"):
        caveat(Local(codec="threshold:0.1"))


@pytest.mark.parametrize(
    "wrong", [{"bits": 0}, {"spread": -1.0}, {"difference": float("nan")}, {"steps": 3}]
)
def test_a_row_that_says_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(LossRow).validate_python(asdict(ROW) | wrong)


def test_every_forecast_of_local_says_it_in_terminals_reports_and_json(capsys):
    machine = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 1e6)])
    strategies = [find_exchange("allreduce"), STRATEGY]
    work = chain((1.0, 4_000_000))
    found = search(lambda _: work, machine, strategies, 8, workers=2)
    assert {one.strategy for one in found} == {"allreduce", "local"}
    for one in found:
        said = [note for note in one.notes if note.startswith("not the same training")]
        assert len(said) == (one.strategy == "local")
    rows = list(map(PlanRow.of, found))
    assert rows[0].strategy == "local"  # on such a link
    assert caveat(Local()) in rows[0].model_dump_json()
    show_plans(console(), rows, "plans")
    assert "1: " + rows[0].explanation in capsys.readouterr().out
    method = next(iter(of_plan(RankingRows.of(found))))
    assert "local on 2 workers is predicted to be the fastest" in method.sentence
    assert caveat(Local()) in method.sentence
