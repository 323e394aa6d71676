"""The synthetic sets that resemble those of the Hogbatch paper: shapes, density, difficulty."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from findings import numbers
from paceline.training.data import Dataset
from paceline.training.data.dataset import TensorSamples
from paceline.training.models.networks import MLP
from paceline.training.recipes.named import recipe_of_data
from papers.hogbatch import DATA_SETS
from papers.lookalike import NAMES, load_lookalike, task
from refusals import refused

SLOW = pytest.mark.slow  # draws or learns thousands of samples
# Values of a sample that are not zero, as the originals' publishers say, and labels of a sample:
# of two classes, the share of the second.
KNOWN = {
    "covtype-like": (12.0, 283_301 / 581_012),
    "w8a-like": (11.65, 0.0297),
    "delicious-like": (18.17, 19.03),
    "real-sim-like": (51.3, 22_238 / 72_309),
}
SHAPES = {f"{row.name}-like": row for row in DATA_SETS}


def load(spec: str, shape: tuple[int, ...] | None = None, seed: int = 0) -> Dataset:
    name, _, options = spec.partition(":")
    return load_lookalike(name, options, shape, seed)


def tensors(samples: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(samples, TensorSamples)
    return samples.inputs, samples.targets


@pytest.fixture(scope="module")
def few() -> dict[str, Dataset]:
    return {name: load(f"{name}:samples={2000 if 'real' in name else 8000}") for name in NAMES}


@SLOW
@pytest.mark.parametrize("name", NAMES)
def test_features_and_labels_are_those_of_table_ii(few, name: str) -> None:
    data, widths = few[name], SHAPES[name].widths
    inputs, targets = tensors(data.train)
    assert (data.name, data.sample_shape, data.num_classes) == (name, (widths[0],), widths[-1])
    assert (inputs.shape[1], inputs.dtype) == (widths[0], torch.float32)
    if name == "delicious-like":
        assert (targets.shape, targets.dtype) == ((8000, 983), torch.bool)
    else:
        assert (targets.unique().tolist(), targets.dtype) == ([0, 1], torch.int64)
    # Density and balance are those of the originals.
    num_present, num_labels = KNOWN[name]
    assert (inputs != 0).sum(1).float().mean().item() == pytest.approx(num_present, rel=0.05)
    counted = targets.float().sum() / len(targets)
    assert counted.item() == pytest.approx(num_labels, rel=0.15, abs=0.01)
    if "real" not in name:
        data, num_samples = load(name), SHAPES[name].num_examples
        sizes = len(data.train) + len(data.test), len(data.test)
        assert sizes == (num_samples, num_samples // 5)


@SLOW
def test_samples_are_of_the_kind_of_the_originals(few) -> None:
    """Ten quantities, an area and a soil; frequent and rare keywords; documents of length one."""
    covtype, *keywords, documents = (tensors(few[name].train)[0] for name in KNOWN)
    assert len(covtype[:, 0].unique()) > 5000
    assert 0 <= covtype.min() < 0.05 < 0.95 < covtype.max() <= 1
    for bits in (covtype[:, 10:14], covtype[:, 14:]):
        assert (bits.unique().tolist(), bits.sum(1).unique().tolist()) == ([0, 1], [1])
        assert (bits.sum(0) > 0).all()
    for inputs in keywords:
        assert inputs.unique().tolist() == [0, 1]
        shares = inputs.mean(0).sort().values
        assert shares[-1] > 8 * shares[len(shares) // 10]
    torch.testing.assert_close(documents.norm(dim=1), torch.ones(len(documents)))
    lengths = (documents > 0).sum(1).float()
    assert lengths.std() > 0.3 * lengths.mean()


@pytest.mark.parametrize("name", [*NAMES[:2], *(pytest.param(n, marks=SLOW) for n in NAMES[2:])])
def test_the_seed_decides_and_fewer_samples_are_the_first(name: str) -> None:
    whole, again, other, part = (
        load(f"{name}:samples={count}", seed=seed)
        for count, seed in ((500, 1), (500, 1), (500, 2), (90, 1))
    )
    for half in ("train", "test"):
        sets = (whole, again, other, part)
        drawn, same, unlike, first = (tensors(getattr(one, half)) for one in sets)
        assert all(map(torch.equal, drawn, same))
        assert not torch.equal(drawn[0], unlike[0])
        assert all(torch.equal(one, drawn[i][: len(one)]) for i, one in enumerate(first))
    train, test = tensors(whole.train)[0], tensors(whole.test)[0]
    assert not torch.equal(train[: len(test)], test)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *(("covtype", 0.94, 0.96), ("w8a", 0.985, 0.995)),
        *(("delicious", 0.75, 0.81), ("real-sim", 0.97, 0.985)),
    ],
)
def test_who_knows_the_teacher_is_right_as_often_as_the_documentation_says(name, least, most):
    draw, probabilities = task(name)
    chances = probabilities(draw(np.random.default_rng(9), 1000 if name == "real-sim" else 6000))
    assert (
        least
        < np.maximum(chances, 1 - chances if chances.shape[1] == 1 else 0).max(1).mean()
        < most
    )


def trained(data: Dataset, widths: tuple[int, ...]) -> float:
    """Train with Adam in 6 epochs, and return the share of test samples that are right."""
    (inputs, targets), test = tensors(data.train), tensors(data.test)
    recipe, model = recipe_of_data(data), MLP(widths)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(6):
        for rows in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            recipe.loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    return float(recipe.score(model(test[0]).detach(), test[1]))


@SLOW
def test_networks_learn_more(few) -> None:
    torch.manual_seed(0)
    covtype, delicious = few["covtype-like"], few["delicious-like"]
    train, test = ([one.numpy() for one in tensors(half)] for half in (covtype.train, covtype.test))
    linear = LogisticRegression(max_iter=500).fit(*train).score(*test)
    assert 0.74 < linear < 0.82
    assert trained(covtype, (54, 128, 64, 2)) > linear + 0.05
    most_frequent = tensors(delicious.test)[1].float().mean(0).max().item()
    assert 0.35 < most_frequent < 0.55
    assert trained(delicious, (500, 128, 983)) > most_frequent + 0.1


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        *[(f"w8a-like:{o}", None) for o in ("samples=0", "samples=", "classes=3", "samples=5,a=6")],
        ("covtype-like:samples=50", (1, 8, 8)),
    ],
)
def test_bad_options_and_models_of_another_shape_are_refused(spec: str, shape) -> None:
    with refused("data"):
        load(spec, shape)


def test_real_sim_needs_almost_six_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    with refused("data") as caught:
        load("real-sim-like")
    assert numbers(caught.value.problem)[-2:] == [5.6, 1.0]
