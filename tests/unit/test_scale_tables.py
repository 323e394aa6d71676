"""The table of synchronisation on the page of a scaling study, against closed forms."""

import re

from paceline.records.scale import ScaleCell, ScaleResult, ScaleSettings
from paceline.report.scale import drawn
from scale_cells import cell, study


def table(cells: list[ScaleCell], title: str = "Synchronisation") -> list[list[str]]:
    """The cells of a section's table, row by row, the head first."""
    result = ScaleResult(
        id="20261122-030000-net-scale",
        paceline="0.1.0",
        settings=ScaleSettings(model="net", workers=(1, 2, 4), batch_size=(16,)),
        machine={},
        cells=tuple(cells),
        insights=(),
    )
    _, sections = drawn(result)
    (section,) = [one for one in sections if f"<h2>{title}</h2>" in one]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [re.findall(r"<t[hd] [^>]*>([^<]*)</t[hd]>", row) for row in rows]


def percent(*shares: float) -> list[str]:
    return [f"{100 * one:.1f} %" for one in shares]


def test_workers_wait_for_the_exchange_s_share_of_an_epoch():
    """Workers compute 100 s among them, or 100 s each, and an exchange of e s shows."""
    costs = {"allreduce": 10.0, "tree": 30.0}
    cells = study(costs, (1, 2, 4)) + study(costs, (1, 2, 4), scaling="weak")
    head, *rows = table(cells)
    assert head[-3:] == ["1 w.", "2 w.", "4 w."]
    found = {(row[0], row[2]): row[-3:] for row in rows}
    assert found == {
        (method, scaling): percent(0, shown_s / (one + shown_s), shown_s / (other + shown_s))
        for method, shown_s in costs.items()
        for scaling, one, other in (("strong", 100 / 2, 100 / 4), ("weak", 100, 100))
    }


def test_idle_time_is_waiting_and_a_hidden_exchange_is_not():
    waits = {"epoch_s": 8.0, "exposed_s": 0.5, "idle_s": 1.5, "hidden_s": 4.0}
    cells = [cell("host", 2, **waits), cell("host", 4, **waits | {"idle_s": 0.3})]
    _, row = table(cells)
    assert row[-2:] == percent(2.0 / 8, 0.8 / 8)


def test_what_was_not_measured_is_a_dash_and_kinds_have_rows_of_their_own():
    waits = {"exposed_s": 1.0, "idle_s": 0.0}
    _, *rows = table([cell("tree", 2, **waits), cell("tree", 4, kind="rehearsed", **waits)])
    assert {row[3]: row[-2:] for row in rows} == {
        "measured": ["10.0 %", "-"],
        "rehearsed": ["-", "10.0 %"],
    }
