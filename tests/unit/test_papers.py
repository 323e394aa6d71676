"""Test the summary of errors, and that the papers' pages match the plans."""

from math import fsum
from pathlib import Path

import pytest

from paceline.training.recipes.named import workload_of
from papers import NAMES, cgdp, dgx1, hogbatch, lookalike, paper
from papers.networks import step_of
from papers.paper_tables import Paper, PaperCell, PaperTable, headlines, markdown, read_printed

PAPERS = Path(__file__).parents[2] / "benchmarks" / "papers"
pytestmark = pytest.mark.slow


def test_the_headline_has_the_mean_error_of_numbers_and_counts_choices():
    cells = (
        PaperCell("one", 100.0, 110.0),
        PaperCell("two", 50.0, 48.0),
        PaperCell("zero", 0.0, 1.0),
        PaperCell("winner", "ring", "tree"),
    )
    assert "| one | 2 | 7.0% | 0 of 1 |" in headlines([Paper("one", (PaperTable("", cells),))])


@pytest.mark.parametrize("name", NAMES)
def test_pages_match_the_plans(name):
    found = paper(name)
    assert markdown(found) in (PAPERS / f"{name}.md").read_text()
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
