"""Du et al. 2017: our plans of its runs beside its tables and figures."""

import pytest

from paceline.core.cost import compute_lane
from paceline.core.simulate import simulate
from paceline.core.wire_format import Purpose
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import messages, split
from paceline.training.recipes.named import workload_of
from papers.headline import headline
from papers.paper_markdown import markdown, shown_tables
from papers.paper_tables import Basis
from papers.wheel import Runs, paper, ungrouped_alexnet


@pytest.fixture(scope="module")
def wheel():
    return paper()


@pytest.fixture(scope="module")
def ours(wheel):
    return {
        (table.title.split(":")[0], cell.name): cell
        for table in wheel.tables
        for cell in table.cells
    }


def test_table_1_is_exact(wheel, ours):
    exact = [cell for cell in wheel.cells if cell.basis is Basis.EXACT]
    assert len(exact) == 12
    assert all(cell.ours == cell.printed for cell in exact)
    # Ten times fewer values travel than in data parallelism.
    assert 10 < ours["Table 1", "data: Total"].ours / ours["Table 1", "hybrid: Total"].ours < 10.5


def test_predictions_are_within_five_per_cent_on_average(wheel):
    one = headline(wheel.cells)
    assert one.error <= 0.05
    assert one.mean.ours < one.mean.error
    assert one.alpha_beta.ours < one.alpha_beta.error
    assert all(abs(cell.error) < 0.08 for cell in wheel.cells if cell.error is not None)


def test_what_follows_from_another_printed_cell_is_no_prediction(ours):
    predicted = {name for name, cell in ours.items() if cell.basis is Basis.PREDICTED}
    assert predicted == {
        ("Section 4.1", "partitioned over two servers"),
        ("Section 4.1", "up"),
        ("Figure 8", "partitioned, two GPUs"),
        ("Figure 8", "Wheel, four GPUs"),
        ("Section 3.4.1", "GPUs for fully-connected workers, k = 3"),
    }
    # Two workers that alternate on a GPU take twice 16.99 s / 20, which is the calibrated cell.
    assert ours["Section 4.1", "Wheel, a worker"].ours == pytest.approx(2 * 16.99 / 20, rel=1e-3)


def test_alpha_beta_computes_and_then_sends_all_over_the_ethernet(ours):
    # 2 x 2.334 million parameters, 2 x 256 x 9216 activations and 256 labels in five messages.
    nbytes = 4 * 2 * (2_334_080 + 256 * 9216) + 4 * 256
    step_s = ours["Section 4.1", "Caffe"].ours + 5 * 50e-6 + nbytes / 117.7e6
    four = ours["Figure 8", "Wheel, four GPUs"]
    assert four.naive.alpha_beta == pytest.approx(20 * step_s / 3, rel=1e-3)
    # Slow-downs of three runs against Caffe's 16.84 s on as many GPUs.
    middle = (24.06 * 2 + 16.99 * 2 + 5.48 * 4) / 16.84 / 3
    assert four.naive.mean == pytest.approx(middle * 16.84 / 4)
    # Of 5.48 s four GPUs that lose nothing would need a quarter of 16.84.
    lost = four.ours - ours["Figure 8", "Caffe"].ours / 4
    assert four.overhead_error == pytest.approx(lost / (5.48 - 16.84 / 4) - 1)


def test_the_bars_of_figure_8_keep_their_order_and_what_was_calibrated_fits(ours):
    # Cutting the model costs time, alternating wins it back, and more GPUs share it evenly.
    bars = [cell.ours for (title, _), cell in ours.items() if title == "Figure 8"]
    caffe, partitioned, two, four = bars
    assert four < caffe < two < partitioned
    assert (caffe, two) == (pytest.approx(16.84, rel=1e-3), pytest.approx(16.99, rel=1e-6))
    assert four == pytest.approx(two / 3, rel=1e-3)


def test_the_parameters_of_both_alexnets():
    # Table 1 counts 3.7 M in convolutions, Caffe's model has 2.3 M of them, in groups.
    ungrouped, caffes = (
        messages(split(work, Wheel()), Wheel())
        for work in (ungrouped_alexnet(), workload_of("alexnet", 256, None))
    )
    assert ungrouped[Purpose.PARAMETERS].num_values == 3_747_200
    assert caffes[Purpose.PARAMETERS].num_values == 2_334_080
    for purpose in (Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS, Purpose.HEAD_PARAMETERS):
        assert ungrouped[purpose] == caffes[purpose]


@pytest.mark.parametrize(
    ("name", "samples", "first"),
    [
        ("alexnet", 1, "classifier.1"),
        ("alexnet", 256, "classifier.1"),
        ("vgg16", 64, "classifier.1"),
        ("lenet5", 512, "loss"),
        ("resnet110", 128, "loss"),
    ],
)
def test_networks_are_cut_before_their_fully_connected_layers(name, samples, first):
    """Or not, where these have fewer parameters than activations: that is asynchronous SGD."""
    assert split(workload_of(name, samples, None), Wheel()).first == first


def test_figure_6_is_ours_with_the_copies_that_our_hub_does_not_need():
    runs, num_steps = Runs.calibrated(), 16
    config = Wheel(workers=6)
    timeline = simulate(runs.plan(config, num_steps), runs.cost)
    hub = [span for span in timeline.spans if compute_lane("gpu0") in span.on]
    busy_s = sum(span.duration_s for span in hub) / num_steps / config.workers
    between_s = runs.period_s(config) / config.workers  # two answers
    in_head, in_all = 58_631_144 * 4, runs.workload.gradient_nbytes  # Table 1: 58.6 M

    both = 2 * in_head + 2 * in_all
    for nbytes, bytes_per_s, usage in (
        (0, 1, 0.41),
        (2 * in_head, 10e9, 0.57),
        (both, 10e9, 0.75),
        (both, 8.6e9, 0.80),
        (both, 6.9e9, 0.90),
    ):
        assert (busy_s + nbytes / bytes_per_s) / between_s == pytest.approx(usage, abs=0.005)


def test_the_readme_has_the_tables_of_the_code(wheel):
    assert shown_tables("wheel") == markdown(wheel)
