"""The Hogbatch paper's networks: by name, their initial weights, and their work."""

import pytest
import torch
from torch import nn

from paceline import plan
from paceline.core.errors import InvalidInput
from paceline.data import load
from paceline.models import find
from paceline.models.networks import SigmoidMLP
from paceline.recipes.named import workload_of
from paceline.studies.papers.hogbatch import DATA_SETS, workload

BATCH = 32


@pytest.mark.parametrize("row", DATA_SETS, ids=lambda row: row.name)
def test_the_paper_s_workload_is_that_of_the_network_in_float64(row) -> None:
    ours, papers = workload_of(f"{row.name}-mlp", BATCH, None), workload(row, BATCH)
    assert len(ours.layers) == len(papers.layers) == len(row.widths) - 1
    assert ours.num_parameters == papers.num_parameters
    assert ours.backward_order == papers.backward_order
    for own, printed in zip(ours.layers, papers.layers, strict=True):
        assert [p.numel for p in own.parameters] == [p.numel for p in printed.parameters]
        assert 2 * own.activation_nbytes == printed.activation_nbytes
    # A float64 operation counts as two. The paper's output layer ends in a softmax, priced as a
    # sigmoid; ours ends in scores.
    for own, printed in zip(ours.layers[:-1], papers.layers[:-1], strict=True):
        assert 2 * own.forward.flops == printed.forward.flops
        assert 2 * own.backward.flops == printed.backward.flops
        assert 2 * own.forward.nbytes == printed.forward.nbytes
    outputs = BATCH * row.widths[-1]
    assert 2 * (ours.layers[-1].forward.flops + 4 * outputs) == papers.layers[-1].forward.flops
    assert 2 * (ours.layers[-1].backward.flops + 3 * outputs) == papers.layers[-1].backward.flops


@pytest.mark.parametrize("row", DATA_SETS, ids=lambda row: row.name)
def test_names_give_the_widths_and_the_data_fit(row) -> None:
    short = find(f"{row.name}-mlp")
    assert (short.input_shape, short.num_classes) == ((row.widths[0],), row.widths[-1])
    with torch.device("meta"):
        written = find(f"sigmoid-mlp-{'-'.join(map(str, row.widths))}").build(None)
        named = short.build(row.widths[-1])
    shapes = [tuple(parameter.shape) for parameter in named.parameters()]
    assert shapes == [tuple(parameter.shape) for parameter in written.parameters()]
    assert shapes == [(out, into) for into, out in zip(row.widths, row.widths[1:], strict=False)]
    if row.name != "real-sim":
        assert load(f"{row.name}-like:samples=4", short.input_shape).num_classes == row.widths[-1]


def test_it_is_a_chain_of_sigmoids_that_ends_in_scores() -> None:
    model, inputs = SigmoidMLP((3, 5, 4, 2)), torch.randn(7, 3)
    one, two, three = (parameter.detach() for parameter in model.parameters())
    expected = torch.sigmoid(torch.sigmoid(inputs @ one.t()) @ two.t()) @ three.t()
    torch.testing.assert_close(model(inputs).detach(), expected)


def test_names_with_widths_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="at least two widths, all positive, not '5'"):
        find("sigmoid-mlp-5")
    with pytest.raises(InvalidInput, match="did you mean 'covtype-mlp'"):
        find("covtyp-mlp")


def test_weights_have_the_documented_spread_and_each_unit_s_sum_up_to_zero() -> None:
    torch.manual_seed(0)
    for layer in find("w8a-mlp").build(None).modules():
        if isinstance(layer, nn.Linear):
            assert layer.weight.std().item() == pytest.approx(6 / layer.in_features**0.5, rel=0.06)
            assert layer.weight.sum(1).abs().max() < 1e-4


def test_signals_of_samples_reach_the_deepest_layer_and_gradients_the_first() -> None:
    # With the weights of PyTorch itself, both vanish: 1e-6 of the scores differ between samples.
    torch.manual_seed(0)
    model = find("covtype-mlp").build(None)
    samples = load("covtype-like:samples=256").train
    inputs, targets = samples.__getitems__(range(256))
    scores = model(inputs)
    assert scores.std(0).min() > 0.1
    nn.functional.cross_entropy(scores, targets).backward()
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    assert max(norms) < 100 * min(norms)


def test_the_planner_knows_the_network() -> None:
    ranking = plan("covtype-mlp", "p3-16xlarge", batch_size=256)
    assert len(ranking) > 0
