"""Test the summaries of errors, and that the papers' pages match the plans."""

from math import fsum
from pathlib import Path

import pytest

from paceline.training.recipes.named import workload_of
from papers import NAMES, cgdp, dgx1, hogbatch, lookalike, paper
from papers.headline import headline, markdown
from papers.networks import step_of
from papers.paper_tables import PaperCell, read_printed, series_means, table_cells

CELLS = (
    PaperCell("one", 100.0, 110.0, mean=120.0, alpha_beta=100.0),
    PaperCell("two", 50.0, 48.0, 45.0, None, (40.0, 40.0)),
    PaperCell("winner", "ring", "tree"),
)


def test_a_naive_predictor_is_compared_with_ours_over_the_same_cells():
    one = headline(CELLS)
    assert (one.num_predicted, one.num_choices, one.num_agreeing_choices) == (2, 1, 0)
    assert (one.mean.num_cells, one.alpha_beta.num_cells) == (2, 1)
    assert (one.mean.error, one.mean.ours) == pytest.approx(((0.2 + 0.1) / 2, 0.07))
    # Alpha-beta predicts only the first cell, where our error is 10 %, not the mean of 7 %.
    assert (one.alpha_beta.error, one.alpha_beta.ours) == pytest.approx((0.0, 0.1))
    assert headline([PaperCell("zero", 0.0, 1.0)]).error is None


def test_the_overhead_error_has_a_sign_and_exceeds_the_step_error():
    # The overhead is 10 of 50 ms; ours is 8. So the step is 4 % too short, the overhead 20 %.
    assert (CELLS[1].error, CELLS[1].overhead_error) == pytest.approx((-0.04, -0.2))
    # A speed-up of 3 on four workers has an overhead of 1; our 2.5 has 1.5, 50 % more.
    speed_up = PaperCell("s", 3.0, 2.5, ideal=(4.0, 4.0))
    one = headline([*CELLS, speed_up])
    assert (one.num_overheads, one.overhead) == (2, pytest.approx(0.15))
    assert PaperCell("s", 4.0, 3.0, ideal=(4.0, 4.0)).overhead_error is None


def test_a_table_of_times_has_a_mean_slow_down_and_only_predictions_are_cells():
    rows = [
        {"cell": "A, 1", "printed": 100.0, "of": [100.0], "kind": "calibrated"},
        {"cell": "A, 2", "printed": 120.0, "of": [130.0], "kind": "predicted", "alone": "A, 1"},
        {"cell": "B, 1", "printed": 10.0, "of": [11.0], "kind": "calibrated"},
        {"cell": "B, 2", "printed": 14.0, "of": [12.0], "kind": "calibrated", "alone": "B, 1"},
    ]
    # The slow-downs 1.2 and 1.4 have the mean 1.3: 100 becomes 130, and 10 becomes 13.
    found = series_means(rows)
    assert {n: found[n] for n in ("A, 2", "B, 2")} == pytest.approx({"A, 2": 130, "B, 2": 13})
    (cell,) = table_cells(rows, lambda x: x, {"A, 2": 125.0})
    assert (cell.mean, cell.alpha_beta) == pytest.approx((130.0, 125.0))
    assert cell.overhead_error == pytest.approx(30 / 20 - 1)


def test_speed_ups_have_a_mean_efficiency_if_a_series_has_two_values():
    speed_ups = [
        {"cell": "2", "printed": 1.8, "workers": 2},
        {"cell": "4", "printed": 3.2, "workers": 4},
    ]
    assert series_means(speed_ups) == pytest.approx({"2": 1.7, "4": 3.4})
    assert series_means(speed_ups[:1]) == {}
    same = [{"cell": name, "printed": 1.07} for name in ("a", "b")]
    assert series_means(same) == {}  # one figure printed twice predicts nothing
    apart = [{"cell": n, "printed": float(n), "series": n} for n in ("1", "2")]
    assert series_means(apart) == {}


@pytest.mark.slow  # plans many cells
@pytest.mark.parametrize("name", NAMES)
def test_pages_match_the_plans(name):
    found = paper(name)
    assert markdown(found) in (Path(__file__).parent / f"{name}.md").read_text()
    kinds = {row["kind"] for table in read_printed(name)["tables"] for row in table["cells"]}
    assert kinds <= {"predicted", "calibrated", "derived", "exact"}


@pytest.mark.parametrize(
    ("name", "num_layers", "num_parameters"),
    [  # layers from table 1; parameters counted in the networks' definitions
        ("alexnet", 8, 60_965_224),
        ("googlenet", 22, 13_378_280),
        ("vgg16", 16, 138_357_544),
        ("resnet152", 152, 60_192_808),
    ],
)
def test_networks_have_the_layers_of_cgdps_table_1_and_merging_preserves_flops(
    name, num_layers, num_parameters
):
    known = cgdp.network(name)
    assert len(known.workload.layers) == num_layers
    assert known.workload.num_parameters == num_parameters == known.fine.num_parameters
    for kind in ("forward", "backward"):
        fine, merged = (
            fsum(getattr(layer, kind).flops for layer in work.layers)
            for work in (known.fine, known.workload)
        )
        assert fine == pytest.approx(merged, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        *(("resnet101", 44_549_160), ("resnet152", 60_192_808)),  # from torchvision
        # from Transformers: BertForMaskedLM of bert-base-uncased, without pooler
        *(("bert-base", 109_514_298), ("bert-large", 335_174_458)),
    ],
)
def test_networks_named_only_in_tables_have_the_published_parameters(name, num_parameters):
    assert step_of(name, 2).num_parameters == num_parameters


def test_an_mxnet_step_equals_the_closed_form_of_its_strategy():
    # Tree messages reach `COPY_EFFICIENCY` of NVLink's bandwidth. With four GPUs, the slowest
    # messages use the one link between gpu2 and gpu3, then the two links between gpu0 and gpu2.
    work, first = dgx1.workload("AlexNet", 16), dgx1._MACHINE.devices[0]
    nbytes = work.gradient_nbytes
    sends_s = sum(2 * (10e-6 + nbytes / (dgx1.COPY_EFFICIENCY * rate)) for rate in (25e9, 50e9))
    adds_s = 2 * (first.call_latency_s + 3 * nbytes / first.memory_bandwidth_bytes_per_s)
    expected_s = dgx1.step_s("AlexNet", 16, "P2P", 1) + 3 * dgx1.ISSUE_S["P2P"] + sends_s + adds_s
    assert dgx1.step_s("AlexNet", 16, "P2P", 4) == pytest.approx(expected_s, rel=5e-3)


def test_covtype_lookalike_has_the_features_and_classes_and_a_fixed_beginning():
    inputs, classes = lookalike.samples(5000)
    assert inputs.shape == (5000, lookalike.NUM_FEATURES)
    assert (inputs[:, 10:14].sum(axis=1) == 1).all()
    assert (inputs[:, 14:].sum(axis=1) == 1).all()
    assert classes.mean() == pytest.approx(0.4876, abs=0.02)
    fewer, _ = lookalike.samples(100)
    assert (fewer == inputs[:100]).all()


@pytest.mark.parametrize("row", hogbatch.DATA_SETS, ids=lambda row: row.name)
def test_the_hogbatch_papers_workload_equals_our_network_in_float64(row) -> None:
    batch_size = 32
    ours = workload_of(f"{row.name}-mlp", batch_size, None)
    papers = hogbatch.workload(row, batch_size)
    written = f"sigmoid-mlp-{'-'.join(map(str, row.widths))}"
    assert workload_of(written, batch_size, None).layers == ours.layers
    assert len(ours.layers) == len(papers.layers) == len(row.widths) - 1
    assert ours.num_parameters == papers.num_parameters
    assert ours.backward_order == papers.backward_order
    # A float64 operation counts as two. The paper's output layer has a softmax, priced as a
    # sigmoid; ours returns logits.
    outputs = batch_size * row.widths[-1]
    for own, printed in zip(ours.layers, papers.layers, strict=True):
        is_last = own is ours.layers[-1]
        assert [p.numel for p in own.parameters] == [p.numel for p in printed.parameters]
        assert 2 * own.activation_nbytes == printed.activation_nbytes
        assert 2 * (own.forward.flops + 4 * outputs * is_last) == printed.forward.flops
        assert 2 * (own.backward.flops + 3 * outputs * is_last) == printed.backward.flops
        assert is_last or 2 * own.forward.nbytes == printed.forward.nbytes
