"""The frame of the papers' tables, and Ma, Rusu et al. 2020: our plans beside its tables."""

from io import StringIO

import pytest
from rich.console import Console

from findings import numbers
from papers import NAMES, hogbatch, paper
from papers.headline import (
    as_object,
    headline,
    headline_rows,
    mean_error,
    show,
    summary,
)
from papers.hogbatch import DATA_SETS, workload
from papers.paper_markdown import markdown, shown_tables
from papers.paper_tables import (
    Basis,
    Naive,
    Paper,
    PaperCell,
    PaperTable,
    read_printed,
    series_means,
    table_cells,
)
from refusals import refused

CELLS = (
    PaperCell("one", 100.0, 110.0, Basis.PREDICTED, Naive(mean=120.0, alpha_beta=100.0)),
    PaperCell("two", 50.0, 48.0, Basis.PREDICTED, Naive(mean=45.0), (40.0, 40.0)),
    PaperCell("three", 7.0, 9.0, Basis.CALIBRATED),
    PaperCell("twice one", 200.0, 300.0, Basis.DERIVED),
    PaperCell("four", 1024.0, 1024.0, Basis.EXACT),
    PaperCell("five", 2.0, 3.0, Basis.EXACT),
    PaperCell("none", 0.0, 0.0, Basis.EXACT),
    PaperCell("winner", "ring", "tree", Basis.PREDICTED),
    PaperCell("winner again", "ring", "ring", Basis.DERIVED),
)
PAPER = Paper("some", "Some, 2020", (PaperTable("Table 1: ms", CELLS),), (("rate", "three"),))


def test_only_predicted_numbers_count_for_the_error():
    # A calibrated cell is 29 % off, a derived one 50 %, an exact one 50 %: none of them counts.
    assert mean_error(PAPER.cells) == pytest.approx((0.1 + 0.04) / 2)
    assert mean_error(CELLS[2:]) is None
    assert mean_error([PaperCell("zero", 0.0, 1.0, Basis.PREDICTED)]) is None


def test_a_naive_predictor_is_held_against_ours_over_the_same_cells():
    one = headline(CELLS)
    assert (one.num_predicted, one.num_choices, one.num_agreeing_choices) == (2, 1, 0)
    assert one.mean.num_cells == 2
    assert (one.mean.error, one.mean.ours) == pytest.approx(((0.2 + 0.1) / 2, 0.07))
    # Alpha-beta says something of the first cell alone, where ours is 10 % off and not 7 %.
    assert one.alpha_beta.num_cells == 1
    assert (one.alpha_beta.error, one.alpha_beta.ours) == pytest.approx((0.0, 0.1))


def test_the_overhead_has_a_sign_and_is_far_more_off_than_the_step():
    # Of 50 ms 10 are lost, and we say 8: a step 4 % too fast has an overhead 20 % too small.
    assert CELLS[1].error == pytest.approx(-0.04)
    assert CELLS[1].overhead_error == pytest.approx(-0.2)
    # A speed-up of 3 on four workers loses one of them; 2.5 would lose half as much again.
    speed_up = PaperCell("s", 3.0, 2.5, Basis.PREDICTED, ideal=(4.0, 4.0))
    assert speed_up.overhead_error == pytest.approx(0.5)
    one = headline([*CELLS, speed_up])
    assert (one.num_overheads, one.overhead) == (2, pytest.approx(0.15))
    assert CELLS[0].overhead_error is None
    assert PaperCell("s", 4.0, 3.0, Basis.PREDICTED, ideal=(4.0, 4.0)).overhead_error is None


ROWS = [
    {"cell": "A, 1", "printed": 100.0, "of": [100.0], "kind": "calibrated"},
    {"cell": "A, 2", "printed": 120.0, "of": [130.0], "kind": "predicted", "alone": "A, 1"},
    {"cell": "B, 1", "printed": 10.0, "of": [11.0], "kind": "calibrated"},
    {"cell": "B, 2", "printed": 14.0, "of": [12.0], "kind": "calibrated", "alone": "B, 1"},
]


def test_the_mean_of_a_table_of_times_is_its_mean_slow_down():
    # Slow-downs of 1.2 and 1.4: the mean makes 130 of 100 and 13 of 10.
    assert {name: series_means(ROWS)[name] for name in ("A, 2", "B, 2")} == pytest.approx(
        {"A, 2": 130.0, "B, 2": 13.0}
    )
    found = {cell.name: cell for cell in table_cells(ROWS, lambda x: x, {"A, 2": 125.0})}
    assert found["A, 2"].naive == Naive(mean=pytest.approx(130.0), alpha_beta=125.0)
    assert found["A, 2"].overhead_error == pytest.approx(30 / 20 - 1)
    # What is not predicted is not compared with any predictor.
    assert found["B, 2"].naive == found["A, 1"].naive == Naive()
    assert found["B, 2"].ideal == (10.0, 11.0)


def test_the_mean_of_speed_ups_is_that_of_efficiencies_and_a_series_has_two_values():
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
    assert series_means([{"cell": "choice", "printed": "ring"}, *same[:1]]) == {}


@pytest.mark.parametrize("kind", [{}, {"kind": "guessed"}])
def test_each_cell_says_what_it_rests_on(kind):
    rows = [{"cell": "one", "printed": 1.0, "of": [1.0], **kind}]
    with pytest.raises(ValueError, match="one: kind"):
        list(table_cells(rows, lambda x: x, {}))
    with pytest.raises(ValueError, match="one"):  # a number beside a word
        PaperCell("one", 1.0, "one", Basis.EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_all_cells_of_all_papers_say_what_they_rest_on(name):
    data = read_printed(name)
    assert data["citation"]
    tables = [table["name"] for table in data["tables"]]
    assert len(tables) == len(set(tables)) > 0
    for table in data["tables"]:
        names = [row["cell"] for row in table["cells"]]
        assert len(set(names)) == len(names)
        for row in table["cells"]:
            assert row["kind"] in set(Basis), row
            assert row.get("alone", row["cell"]) in names, row


def test_the_object_has_all_cells_and_the_naive_values_of_those_that_have_any():
    found = as_object([PAPER, PAPER])
    one = found["papers"][0]
    assert one["name"] == "some"
    [table] = one["tables"]
    assert table["title"] == "Table 1: ms"
    assert table["cells"][0] == {
        "cell": "one", "printed": 100.0, "ours": 110.0, "kind": "predicted",
        "naive": {"mean": 120.0, "alpha_beta": 100.0},
    }  # fmt: skip
    assert table["cells"][1]["naive"] == {"mean": 45.0}
    assert table["cells"][1]["overhead_error"] == pytest.approx(-0.2)
    assert [cell["kind"] for cell in table["cells"]] == [cell.basis for cell in CELLS]
    assert one["headline"]["num_predicted"] == 2
    assert one["headline"]["mean"]["error"] == pytest.approx(0.15)
    assert found["headline"]["num_predicted"] == 4


def test_tables_say_errors_and_what_agrees():
    out = Console(file=StringIO(), width=200)
    show(out, [PAPER, PAPER])
    text = out.file.getvalue()
    for part in ("+10.0%", "-4.0%", "differs +50.0%", "agrees"):
        assert part in text
    assert summary(PAPER) in text
    # Predicted, the mean's and alpha-beta's errors beside ours, overheads, choices, not counted.
    predicted, choices = [2, 7, 15, 7, 2, 0, 10, 1, -20, 1], [0, 1]
    assert numbers(summary(PAPER)) == [*predicted, *choices, 2, 1, 1, 3, 2]
    assert numbers(summary(Paper("none", "", (PaperTable("t", CELLS[2:4]),)))) == [0, 1, 1, 0]
    assert [row[:3] for row in headline_rows([PAPER, PAPER])] == [
        ("some", "2", "7.0%"), ("some", "2", "7.0%"), ("all papers", "4", "7.0%")
    ]  # fmt: skip


def test_an_unknown_paper_is_refused():
    with refused("paper"):
        paper("resnet")


_, W8A, _, REAL_SIM = DATA_SETS


@pytest.fixture(scope="module")
def of_hogbatch():
    return hogbatch.paper()


@pytest.mark.parametrize(("data", "printed"), [(W8A, 155e6), (REAL_SIM, 12.1e9)])
def test_examples_have_the_bytes_that_table_ii_prints(data, printed):
    # Without labels: table II counts the features, in float64.
    labels = 8 * data.widths[-1] * data.num_examples
    nbytes = workload(data, data.num_examples).input_nbytes - labels
    assert nbytes == pytest.approx(printed, rel=5e-3)


@pytest.mark.parametrize("data", DATA_SETS, ids=lambda data: data.name)
def test_a_step_multiplies_each_weight_three_times_a_sample(data):
    # Forward, and in backward for the gradients of weights and inputs; not for the samples'.
    batch_size = 64
    work = workload(data, batch_size)
    weights = [a * b for a, b in zip(data.widths[:-1], data.widths[1:], strict=True)]
    assert work.num_parameters == sum(weights)
    products = 2 * 2 * batch_size * (3 * sum(weights) - weights[0])  # float64 counts twice
    flops = sum(layer.forward.flops + layer.backward.flops for layer in work.layers)
    units = sum(data.widths[1:])
    assert flops - products == 2 * batch_size * units * (4 + 3)  # the sigmoids


@pytest.mark.parametrize("data", DATA_SETS, ids=lambda data: data.name)
def test_hogwild_takes_as_long_as_the_traffic_of_its_models(data):
    # Each thread reads the model forward and backward, writes its gradients, and updates: 6 times
    # the parameters, and 5 times those whose inputs need no gradient. Activations are the rest.
    weights = [a * b for a, b in zip(data.widths[:-1], data.widths[1:], strict=True)]
    traffic = 8 * data.num_examples * (6 * sum(weights) - weights[0])
    # Of 56 normal numbers the largest is 2.29 deviations above the mean, each 3 % of a batch.
    at_least_s = 1.0687 * traffic / 153.6e9
    assert at_least_s < hogbatch.epoch_s(data, "cpu0") < 1.05 * at_least_s
    assert at_least_s > hogbatch.HORIZON_S  # no epoch is finished within it


def test_what_is_predicted_is_as_near_as_the_readme_says(of_hogbatch):
    one = headline(of_hogbatch.cells)
    assert one.num_predicted == 4
    assert one.error < 0.14
    assert one.error < one.mean.error
    assert (one.num_agreeing_choices, one.num_choices) == (7, 8)


def test_real_sims_copies_alone_forbid_the_printed_ratio():
    # 12.1 GB through PCIe 3.0 at its nominal 15.75 GB/s, then the products at the nominal 7.8
    # Tflop/s: even so the GPU needs 1.2 s for an epoch, and the CPU's would have to take 286 s.
    work = workload(REAL_SIM, REAL_SIM.num_examples)
    flops = sum(layer.forward.flops + layer.backward.flops for layer in work.layers) / 2
    gpu_s = work.input_nbytes / 15.75e9 + flops / 7.8e12
    assert 236 * gpu_s == pytest.approx(286, abs=1)
    assert hogbatch.epoch_s(REAL_SIM, "cpu0") < 0.85 * 236 * gpu_s


def test_the_readme_has_the_tables_of_the_code(of_hogbatch):
    assert shown_tables("hogbatch") == markdown(of_hogbatch)
