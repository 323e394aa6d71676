from pathlib import Path

import pytest

from paceline.machine_file import find_machine
from paceline.papers.cells import Basis, mean_error
from paceline.papers.dettmers8bit import board, cluster, paper
from paceline.papers.tables import markdown

README = Path(__file__).parents[2] / "papers" / "dettmers8bit" / "README.md"


@pytest.fixture(scope="module")
def tables():
    return paper()


def ours(tables, title: str) -> dict[str, float]:
    return {
        cell.name: cell.ours
        for table in tables.tables
        if table.title.startswith(title)
        for cell in table.cells
    }


def test_predictions_are_within_one_and_a_half_per_cent(tables):
    assert mean_error(tables.cells) <= 0.015


def test_exact_cells_agree_but_for_those_that_the_readme_explains(tables):
    differing = {
        (cell.printed, round(cell.ours, 3))
        for cell in tables.cells
        if cell.basis is Basis.EXACT and cell.printed != pytest.approx(cell.ours, rel=1e-9)
    }
    assert differing == {
        (0.045, 0.022),
        (0.85, 0.84),
        (3.34, 3.345),
        (6.81, 7.01),
        (2312, 2304),
        (13872, 13824),
    }


def test_calibrated_cells_are_met(tables):
    taken = [cell for cell in tables.cells if cell.basis is Basis.CALIBRATED]
    assert len(taken) == 10
    assert all(abs(cell.error) < 0.01 for cell in taken)


def test_the_closed_form_prints_the_single_nodes_speed_ups():
    found = [board.speedup(bits, total) for total in (104.1, 177.0) for bits in (32, 8)]
    assert found == pytest.approx([3.53, 3.67, 3.71, 3.8], abs=0.005)


@pytest.mark.parametrize("as_table_3", [False, True])
@pytest.mark.parametrize("bits", [32, 8])
def test_the_plan_is_within_ten_per_cent_of_the_closed_form(bits, as_table_3):
    assert board.simulated(bits, as_table_3=as_table_3) == pytest.approx(
        board.speedup(bits), rel=0.1
    )


def test_without_any_exchange_the_plan_is_the_closed_form_without_penalties(monkeypatch):
    # What remains is the time of the convolutions and four passes through a quarter of the head.
    free = dict.fromkeys((32, 8), (1e-9,) * 9)
    monkeypatch.setattr(board, "SYNC_MS", free)
    expected = 4 * 104.1 / (104.1 - 6.5 + 4 * 3.345)
    assert board.simulated(32, as_table_3=True) == pytest.approx(expected, rel=1e-6)


def test_eight_bits_save_time_only_where_the_link_is_the_bottleneck():
    # By table 3, a sub-batch's exchanges take twice as long as its products: 6.6 ms for 3.3.
    assert board.simulated(8, as_table_3=True) > board.simulated(32, as_table_3=True)
    # By the bytes that really travel they hide, and encoding costs more than it saves.
    assert board.simulated(8) < board.simulated(32)


def test_four_messages_cross_the_board_at_a_time():
    assert board.messages_in_turn(find_machine("pcie-4gpu")) == 4


def test_messages_of_a_quarter_of_the_gradients():
    # 64 x 192 filters of 5 x 5, 4 bytes each, a quarter: 0.29 MB (table 3).
    assert board.message_sizes()[1] == 64 * 192 * 25
    assert board.message_sizes()[5] == 128 * 9216


def test_the_cluster_has_96_gpus_on_32_nodes():
    machine = find_machine("infiniband-96gpu").for_workers(96)
    assert len(machine.devices) == 96
    assert cluster.num_others() == 31
    route = machine.route(machine.devices[0], machine.devices[95])
    assert sum(hop.link.latency_s for hop in route[1:-1]) == pytest.approx(6e-6)


def test_the_rate_of_the_cluster_is_below_infinibands(tables):
    # 6 GB/s is printed; 31 messages of 1,152 KiB at that rate and 0.3 ms are 15.4 ms and not 17.4.
    assert 1024e3 * cluster.effective_rate() == pytest.approx(4.515e9, rel=1e-3)


def test_table_1_repeats_the_other_tables(tables):
    first, last = ours(tables, "Table 1"), ours(tables, "Table 7")
    assert {name.removeprefix("96 GPUs, "): value for name, value in first.items()}.items() >= (
        last.items()
    )


@pytest.mark.parametrize("row", cluster.ROWS, ids=lambda row: str(row.sub_batch))
@pytest.mark.parametrize("bits", [32, 8])
def test_a_schedule_is_bounded_by_its_wire_and_by_its_products(row, bits):
    once, number = cluster.single_ms(row, bits), 12288 // row.sub_batch
    expected = once + (number - 1) * max(once, 6.5) + 6.5
    assert cluster.scheduled_ms(row, bits) == pytest.approx(expected)


def test_the_readme_shows_what_the_code_says(tables):
    text = README.read_text()
    shown = text.partition("<!-- tables -->\n")[2].partition("\n<!-- /tables -->")[0]
    assert shown.strip() == markdown(tables)
    for row in cluster.ROWS:
        speedups = [cluster.speedup_of(cluster.scheduled_ms(row, bits)) for bits in (32, 8)]
        line = f"| {row.sub_batch:,} | {row.speedup[0]} | {speedups[0]:.1f} | "
        assert line + f"{row.speedup[1]} | {speedups[1]:.1f} |" in text
    for as_table_3 in (False, True):
        for bits in (32, 8):
            assert f"{board.simulated(bits, as_table_3=as_table_3):.2f}" in text
