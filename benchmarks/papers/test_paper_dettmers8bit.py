"""Dettmers 2016: its arithmetic again, its machines' exchanges, and our plans beside them."""

import pytest

from papers import dettmers8bit as dettmers
from papers.dettmers8bit_network import FC_MS
from papers.dettmers8bit_planned import planned
from papers.headline import headline
from papers.paper_markdown import markdown, readme, shown_tables
from papers.paper_tables import Basis, printed_values

PARTS = [(bits, as_table_3) for bits in (32, 8) for as_table_3 in (False, True)]


@pytest.fixture(scope="module")
def tables():
    return dettmers.paper()


def of_one_node(tables) -> list:
    found = [one for one in tables.tables if not one.title.startswith("Planned on infiniband")]
    return [cell for table in found for cell in table.cells]


def test_predictions_of_one_node_are_within_five_per_cent_and_nearer_than_naive_ones(tables):
    one = headline(of_one_node(tables))
    assert one.error <= 0.05
    assert one.mean.ours < one.mean.error
    assert one.alpha_beta.ours < one.alpha_beta.error
    assert one.alpha_beta.num_cells == one.num_overheads == 4


def test_alpha_beta_is_a_ring_of_all_gradients_after_the_step(tables):
    # 43.1 million weights of 4 bytes; six messages of a quarter, two latencies each, at 5.25 GB/s.
    num_weights = 64 * 363 + 192 * 1600 + 384 * 1728 + 256 * 3456 + 256 * 2304
    num_weights += 9216 * 3072 + 3072 * 3072 + 3072 * 1000
    exchange_ms = 6 * num_weights / 5.25e9 * 1e3
    (cell,) = (
        cell for cell in of_one_node(tables)
        if cell.name == "NervanaGPU, 32-bit" and cell.basis is Basis.PREDICTED
    )  # fmt: skip
    assert cell.naive.alpha_beta == pytest.approx(4 * 104.1 / (104.1 + exchange_ms), rel=1e-3)
    assert cell.naive.mean == pytest.approx((3.53 + 3.67 + 3.71 + 3.8) / 4)
    assert cell.overhead_error == pytest.approx((4 - cell.ours) / (4 - 3.53) - 1)


def test_the_closed_form_prints_the_single_nodes_speed_ups():
    found = [dettmers.speedup(bits, total) for total in (104.1, 177.0) for bits in (32, 8)]
    assert found == pytest.approx([3.53, 3.67, 3.71, 3.8], abs=0.005)


@pytest.mark.parametrize(("bits", "as_table_3"), PARTS)
def test_the_plan_is_within_ten_per_cent_of_the_closed_form(bits, as_table_3):
    assert dettmers.simulated(bits, as_table_3=as_table_3) == pytest.approx(
        dettmers.speedup(bits), rel=0.1
    )


def test_without_any_exchange_the_plan_is_the_closed_form_without_penalties(monkeypatch):
    # What remains is the time of the convolutions and four passes through a quarter of the head.
    free = dict.fromkeys(dettmers.SYNC_MS, 1e-9)
    monkeypatch.setattr(dettmers, "SYNC_MS", free)
    expected = 4 * 104.1 / (104.1 - 6.5 + 4 * 3.345)
    assert dettmers.simulated(32, as_table_3=True) == pytest.approx(expected, rel=1e-6)


def test_a_message_takes_its_latency_and_its_bytes():
    # Of 12288 samples each of 96 GPUs has 128, and sends them to one GPU after another.
    assert planned(12288, 32).message_ms == pytest.approx(7e-3 + 128 * 9216 * 4 / 5e9 * 1e3)


def scheduled_ms(sub_batch: int, bits: int) -> float:
    """Return the milliseconds where a sub-batch travels while the one before it is computed."""
    once, number = dettmers.single_ms(sub_batch, bits), dettmers.SAMPLES // sub_batch
    return once + (number - 1) * max(once, FC_MS) + FC_MS


def test_the_readme_shows_what_the_code_says(tables):
    assert shown_tables("dettmers8bit") == markdown(tables)
    text = readme("dettmers8bit")
    printed = printed_values("dettmers8bit", "table 7")
    for size in dettmers.LATENCY_MS:
        first, last = (dettmers.speedup_of(scheduled_ms(size, bits)) for bits in (32, 8))
        line = f"| {size:,} | {printed[size, 32]} | {first:.1f} | "
        assert line + f"{printed[size, 8]} | {last:.1f} |" in text
    for bits, as_table_3 in PARTS:
        assert f"{dettmers.simulated(bits, as_table_3=as_table_3):.2f}" in text
