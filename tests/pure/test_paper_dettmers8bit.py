"""Dettmers 2016: its arithmetic again, its machines' exchanges, and our plans beside them."""

import pytest

from paceline.core.cost import Measured, compute_lane, link_lane
from paceline.core.plan import Kind, Plan, PriceKey, Task, TaskId
from paceline.core.simulate import simulate
from paceline.records.machine_file import find_machine
from paceline.studies.papers import dettmers8bit as dettmers
from paceline.studies.papers.dettmers8bit_network import FC_MS
from paceline.studies.papers.dettmers8bit_planned import planned
from paceline.studies.papers.headline import headline
from paceline.studies.papers.paper_tables import Basis, printed_values
from paper_markdown import markdown, readme, shown_tables

PARTS = [(bits, as_table_3) for bits in (32, 8) for as_table_3 in (False, True)]


@pytest.fixture(scope="module")
def tables():
    return dettmers.paper()


def ours(tables, title: str) -> dict[str, float]:
    (found,) = [one for one in tables.tables if one.title.startswith(title)]
    return {cell.name: cell.ours for cell in found.cells}


def test_only_the_machines_exchanges_and_the_simulated_plans_are_predicted(tables):
    # All else is the paper's own arithmetic, done again on its printed cells.
    num_predicted = {
        table.title.split(":")[0]: sum(cell.basis is Basis.PREDICTED for cell in table.cells)
        for table in tables.tables
        if "simulated with" not in table.title
    }
    planned = {f"Planned on infiniband-96gpu, table {number}": 12 for number in (5, 6, 7)}
    assert {title: n for title, n in num_predicted.items() if n} == (
        {"Table 3": 9, "Section 5.1": 4} | planned
    )


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


def test_exact_and_derived_cells_differ_only_where_the_readme_explains(tables):
    differing = {
        (cell.printed, round(cell.ours, 3))
        for cell in tables.cells
        if cell.basis is Basis.EXACT and cell.printed != pytest.approx(cell.ours, rel=1e-9)
    }
    assert differing == {(0.045, 0.022), (0.85, 0.84), (2312, 2304), (13872, 13824)}
    shown = {table.title.split(":")[1]: table for table in tables.tables}
    differing = {
        (cell.printed, round(cell.ours, 3))
        for cell in shown[" the single node's closed form"].cells
        if cell.printed != pytest.approx(cell.ours, rel=1e-9)
    }
    assert differing == {(3.34, 3.345), (6.81, 7.01)}


def test_calibrated_cells_are_met(tables):
    taken = [cell for cell in tables.cells if cell.basis is Basis.CALIBRATED]
    assert len(taken) == 11
    assert all(abs(cell.error) < 0.01 for cell in taken)


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


def test_eight_bits_save_time_only_where_the_link_is_the_bottleneck():
    # By table 3, a sub-batch's exchanges take twice as long as its products: 6.6 ms for 3.3.
    assert dettmers.simulated(8, as_table_3=True) > dettmers.simulated(32, as_table_3=True)
    # By the bytes that really travel they hide, and encoding costs more than it saves.
    assert dettmers.simulated(8) < dettmers.simulated(32)


def test_four_messages_of_a_quarter_of_the_gradients_cross_the_board_at_a_time():
    assert dettmers.messages_in_turn(find_machine("pcie-4gpu")) == 4
    # 64 x 192 filters of 5 x 5, 4 bytes each, a quarter: 0.29 MB (table 3).
    assert dettmers.message_sizes()["conv5, 64 -> 192"] == 64 * 192 * 25
    assert dettmers.message_sizes()[dettmers.ACTIVATION] == 128 * 9216


def test_the_cluster_has_96_gpus_on_32_nodes(tables):
    machine = find_machine("infiniband-96gpu").for_workers(96)
    assert len(machine.devices) == 96
    assert dettmers.num_others() == 31
    route = machine.route(machine.devices[0], machine.devices[95])
    assert sum(hop.link.latency_s for hop in route[1:-1]) == pytest.approx(6e-6)
    # 6 GB/s is printed; 31 messages of 1,152 KiB at that rate and 0.3 ms are 15.4 ms and not 17.4.
    assert 1024e3 * dettmers.effective_rate() == pytest.approx(4.515e9, rel=1e-3)


def test_table_1_repeats_the_other_tables(tables):
    first, last = ours(tables, "Table 1"), ours(tables, "Table 7")
    assert {name.removeprefix("96 GPUs, "): value for name, value in first.items()}.items() >= (
        last.items()
    )


def test_plans_of_the_cluster_have_table_7s_order_where_it_counts_transfers_once():
    printed = printed_values("dettmers8bit", "table 7")
    eight = {size: planned(size, 8).speedup for size in dettmers.LATENCY_MS}
    fair = [128, 256, 512, 1024, 2048]  # of one pass the closed form counts 31 transfers
    assert sorted(fair, key=eight.__getitem__) == fair
    assert sorted(fair, key=lambda size: printed[size, 8]) == fair
    assert max(abs(eight[size] / printed[size, 8] - 1) for size in fair) < 0.17
    for size in fair[:3]:  # above, table 5's latencies grow faster than its messages
        assert planned(size, 32).speedup == pytest.approx(printed[size, 32], rel=0.2)


@pytest.mark.parametrize("bits", [32, 8])
def test_messages_of_the_smallest_sub_batches_are_mostly_latency(bits):
    # 95 messages of 7 us for each of 7 exchanges of 96 passes: what few passes save.
    latencies_ms = 96 * 7 * 95 * 7e-3
    saved_ms = planned(128, bits).total_ms - planned(12288, bits).total_ms
    assert 0.8 * latencies_ms < saved_ms < 1.1 * latencies_ms


def test_a_message_takes_its_latency_and_its_bytes():
    # Of 12288 samples each of 96 GPUs has 128, and sends them to one GPU after another.
    assert planned(12288, 32).message_ms == pytest.approx(7e-3 + 128 * 9216 * 4 / 5e9 * 1e3)


def scheduled_ms(sub_batch: int, bits: int) -> float:
    """Return the milliseconds where a sub-batch travels while the one before it is computed."""
    wire, lane = link_lane("node", "fabric"), compute_lane("gpu")
    tasks: list[Task] = []
    for number in range(dettmers.SAMPLES // sub_batch):
        before = (tasks[-2].id,) if tasks else ()
        sent = Task(TaskId(number, Kind.SEND), (wire,), after=before)
        tasks += (sent, Task(TaskId(number, Kind.FORWARD, "", 0), (lane,), after=(sent.id,)))
    one_send, one_head = PriceKey(wire.owner, Kind.SEND), PriceKey(lane.owner, Kind.FORWARD)
    cost = Measured({one_send: dettmers.single_ms(sub_batch, bits), one_head: FC_MS})
    return simulate(Plan(tasks), cost).makespan_s


@pytest.mark.parametrize("sub_batch", dettmers.LATENCY_MS)
@pytest.mark.parametrize("bits", [32, 8])
def test_a_schedule_is_bounded_by_its_wire_and_by_its_products(sub_batch, bits):
    once, number = dettmers.single_ms(sub_batch, bits), 12288 // sub_batch
    expected = once + (number - 1) * max(once, 6.5) + 6.5
    assert scheduled_ms(sub_batch, bits) == pytest.approx(expected)


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
