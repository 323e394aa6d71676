"""Tables of the page of a scaling study: what they doubt, and how far off predictions are."""

import re

from paceline.records.scale import ScaleCell, ScaleResult, ScaleSettings
from paceline.report.scale import drawn
from scale_cells import cell

OVERHEAD, BESIDE = "A method&#x27;s overhead on one worker", "Predicted beside found"


def section(cells: list[ScaleCell], title: str) -> str:
    """Return a section of the page of a study with these cells."""
    result = ScaleResult(
        id="20261122-030000-net-scale",
        paceline="0.1.0",
        settings=ScaleSettings(model="net", workers=(1, 2), batch_size=(16,)),
        machine={},
        cells=tuple(cells),
        insights=(),
    )
    _, sections = drawn(result)
    (found,) = [one for one in sections if f"<h2>{title}</h2>" in one]
    return found


def rows(html: str) -> list[list[str]]:
    """Return the texts of a table's cells, row by row, without the head."""
    _, *found = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<td [^>]*>([^<]*)</td>", row) for row in found]


def test_overheads_that_cannot_be_told_apart_are_marked():
    found = section(
        [
            cell("tree", epoch_s=10.0, spread=(9.8, 10.2)),
            cell("host", epoch_s=10.1, spread=(9.9, 10.4)),
            cell("allreduce", epoch_s=12.18, spread=(12.0, 12.3)),
        ],
        OVERHEAD,
    )
    times = ["+0.0 %", "+1.0 %, not told apart", "+21.8 %"]
    assert rows(found) == [["measured", "16", "10.0 s", *times]]
    assert 'data-value="1">+1.0 %, not told apart' in found  # what is copied is the number
    assert "busy" not in found


def test_overheads_within_the_ranges_of_predictions_are_marked():
    def guess(method: str, epoch_s: float) -> ScaleCell:
        spread = (0.87 * epoch_s, 1.13 * epoch_s)
        return cell(method, kind="predicted", epoch_s=epoch_s, spread=spread)

    found = section([guess("tree", 10.0), guess("host", 12.9), guess("allreduce", 13.1)], OVERHEAD)
    assert rows(found)[0][-3:] == ["+0.0 %", "+29.0 %, not told apart", "+31.0 %"]


def test_overheads_on_a_busy_machine_are_doubted():
    busy = section(
        [cell("tree", spread=(8.0, 13.0)), cell("host", epoch_s=20.0, spread=(19.0, 21.0))],
        OVERHEAD,
    )
    assert rows(busy)[0][-1] == "+100.0 %"  # as much can be told all the same
    assert (
        "This machine is busy with other programs: repetitions lie ±25 % around their median, and "
        "overheads are as uncertain."
    ) in busy


def test_only_what_ran_on_one_worker_makes_its_overheads_doubtful():
    quiet = [cell("tree"), cell("host", epoch_s=20.0)]
    assert "busy" not in section([*quiet, cell("tree", 2, spread=(5.0, 15.0))], OVERHEAD)


def test_an_overhead_beyond_tenfold_is_named_in_times():
    found = section([cell("tree"), cell("host", epoch_s=2529.83)], OVERHEAD)
    assert rows(found)[0][-1] == "253 times"


def beside(**epochs_s: tuple[float, float]) -> str:
    """Return the section of methods of which an epoch was predicted, and found, to take so long."""
    pairs = [
        (cell(method, kind="predicted", epoch_s=predicted_s), cell(method, epoch_s=found_s))
        for method, (predicted_s, found_s) in epochs_s.items()
    ]
    alone = cell("tree", 2, kind="predicted", epoch_s=1e6)  # nothing was found beside it
    return section([alone, *(one for pair in pairs for one in pair)], BESIDE)


def test_predictions_too_long_and_too_short_do_not_make_up_for_each_other():
    """By 20 %, -10 % and 0 %: 10 % on average, and 3.3 % if signs counted."""
    found = beside(tree=(12.0, 10.0), host=(18.0, 20.0), allreduce=(5.0, 5.0))
    assert "Predictions are off by 10.0 % on average." in found
    assert [row[-1] for row in rows(found)] == ["+20.0 %", "-10.0 %", "+0.0 %"]
    assert [row[0] for row in rows(found)] == ["tree", "host", "allreduce"]


def test_predictions_are_off_by_a_share_of_what_was_found():
    """Of 20 s for 10 s that is all of it; as a share of the prediction it would be half."""
    assert "Predictions are off by 100.0 % on average." in beside(tree=(20.0, 10.0))


def test_a_prediction_beyond_tenfold_is_named_in_times():
    assert rows(beside(tree=(2529.83, 10.0)))[0][-1] == "253 times"
