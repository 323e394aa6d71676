"""Data sets by their spec, their splits, and loaders."""

import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate

from paceline.training.data import ShardedBatches, load, loader
from paceline.training.data.dataset import TensorSamples
from paceline.training.data.sampler import stratified_split
from refusals import refused


def tensors(samples: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(samples, TensorSamples)
    return samples.inputs, samples.targets


def counted(num_samples: int) -> TensorSamples:
    numbers = torch.arange(num_samples)
    return TensorSamples(numbers.float().unsqueeze(1), numbers)


def test_a_loader_gives_the_batches_of_its_sampler() -> None:
    batches, got, before = ShardedBatches(50, 12, 1, 3, seed=1), [], torch.get_rng_state()
    batches.set_epoch(2)
    steps = loader(counted(50), batches)
    assert len(steps) == len(batches)
    for inputs, targets in steps:
        assert torch.equal(inputs.squeeze(1), targets.float())
        got.append(targets.tolist())
    assert got == list(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_refuses_batches_and_workers_that_do_not_fit_its_samples() -> None:
    with refused("batches"):
        loader(counted(20), ShardedBatches(30, 5, 0, 1, seed=0))
    with refused("num_workers", got=2):
        loader(counted(20), ShardedBatches(20, 5, 0, 1, seed=0), num_workers=2)


def test_a_split_takes_a_fifth_of_each_class_by_the_seed() -> None:
    targets = np.repeat(np.arange(4), [50, 7, 2, 1])
    train, test = stratified_split(targets, seed=0)
    assert sorted([*train, *test]) == list(range(60))
    assert np.bincount(targets[test], minlength=4).tolist() == [10, 1, 1, 0]
    again, other = (stratified_split(targets, seed)[1].tolist() for seed in (0, 1))
    assert test.tolist() == again != other
    with refused("data"):
        stratified_split(np.arange(5), seed=0)


class TestDigits:
    def test_all_the_handwriting_is_there_and_normalised(self) -> None:
        data = load("digits")
        (inputs, targets), (test_inputs, test_targets) = tensors(data.train), tensors(data.test)
        assert (data.name, data.num_classes, data.sample_shape) == ("digits", 10, (1, 8, 8))
        assert inputs.shape == (1438, 1, 8, 8)
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
        assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
        assert inputs.std().item() == pytest.approx(1, abs=1e-3)
        assert test_inputs.unique().numel() == 17  # 17 levels of grey, scaled
        # Train and test are disjoint parts of the source, in which all images differ.
        source = load_digits()
        both = torch.cat([inputs, test_inputs]).flatten(1)
        grey = ((both - both.min()) / (both.max() - both.min()) * 16).round().int().tolist()
        label_of = {tuple(map(int, x)): y for x, y in zip(source.data, source.target, strict=True)}
        assert len(label_of) == len(grey) == 1797
        labels = torch.cat([targets, test_targets]).tolist()
        assert {tuple(image): label for image, label in zip(grey, labels, strict=True)} == label_of
        flat, _ = tensors(load("digits", (64,)).train)
        assert torch.equal(flat, inputs.reshape(-1, 64))

    @pytest.mark.parametrize("size", [(13, 16), (5, 4), (8, 8)])
    def test_resized_images_are_bilinear_with_repeated_channels(self, size) -> None:
        images, _ = tensors(load("digits").test)
        data = load("digits", (3, *size))
        inputs, _ = data.test.__getitems__([3, 0])
        assert inputs.is_contiguous()
        expected = interpolate(images[[3, 0]], size, mode="bilinear").expand(2, 3, *size)
        torch.testing.assert_close(inputs, expected, rtol=0, atol=1e-5)
        stored, _ = tensors(data.train)  # the channels share their memory
        assert stored.untyped_storage().nbytes() == len(stored) * size[0] * size[1] * 4


class TestSynthetic:
    def test_the_spec_gives_sizes_and_else_the_defaults(self) -> None:
        data = load("synthetic", (2,))
        assert (len(data.train), len(data.test), data.num_classes) == (512, 128, 10)
        assert load("synthetic:samples=10").sample_shape == (3, 224, 224)
        assert load("synthetic:3x4", (3, 4)).sample_shape == (3, 4)
        data = load("synthetic:1x6x5,classes=4,samples=30")
        inputs, targets = tensors(data.train)
        assert inputs.shape == (30, *data.sample_shape) == (30, 1, 6, 5)
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
        assert (len(data.test), data.num_classes) == (8, 4)
        assert sorted(torch.bincount(targets).tolist()) == [7, 7, 8, 8]

    def test_the_seed_decides(self) -> None:
        first, again, other = (
            tensors(load("synthetic:7,samples=20", seed=seed).train) for seed in (1, 1, 2)
        )
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert not torch.equal(first[0], other[0])

    @pytest.mark.parametrize("shape", ["3x2x9", "40", "6x7", "3x32x32"])
    def test_classes_can_be_learned_and_carry_over_to_the_test_set(self, shape: str) -> None:
        data = load(f"synthetic:{shape},classes=5,samples=400")
        (inputs, targets), (test_inputs, test_targets) = tensors(data.train), tensors(data.test)
        assert inputs.square().mean().item() == pytest.approx(1, abs=0.15)
        means = torch.stack([inputs[targets == c].mean(0).flatten() for c in range(5)])
        nearest = torch.cdist(test_inputs.flatten(1), means).argmin(1)
        assert (nearest == test_targets).float().mean() > 0.9


REFUSED = [
    *(
        (spec, None, "data")
        for spec in ("", "mnist", "digits:", "libsvm", "libsvm:", "images:", "Digits", "syntheti")
    ),
    *((spec, None, "data") for spec in ("text:", "masked-text:", "tokens:", "tokens", "texts")),
    *(
        (f"synthetic:{options}", None, "data")
        for options in (
            *("3x0x4", "3x4,5x6", "classes=x", "classes=3,classes=4", "colours=3", "3x4,", "-3"),
            "samples=" + "9" * 5000,
            "\u0663",  # a digit, but not an ASCII one
            *("classes=1", "samples=9", "99999x99999,samples=100000"),
        )
    ),
    ("synthetic:3x4", (4, 3), "data"),
    *(("synthetic", shape, "input_shape") for shape in ((), (0,), (3, -1, 4))),
    *(("digits", shape, "input_shape") for shape in ((63,), (8, 8), (2, 8, 8), (1, 1, 8, 8))),
    *(("images:.", shape, "input_shape") for shape in ((4, 4), (2, 4, 4), (1, 3, 4, 4))),
    *((spec, (3, 32, 32), "input_shape") for spec in ("text", "masked-text", "tokens:a.npy")),
    ("text", (0,), "input_shape"),
    ("digits", None, "seed"),
]


@pytest.mark.parametrize(("spec", "shape", "field"), REFUSED)
def test_specs_shapes_and_seeds_are_refused(spec, shape, field) -> None:
    with refused(field):
        load(spec, shape, -1 if field == "seed" else 0)


@pytest.mark.parametrize(
    ("spec", "module", "package"),
    [
        ("digits", "sklearn", "scikit-learn"),
        ("libsvm:{}", "sklearn.datasets", "scikit-learn"),
        ("images:{}", "PIL", "Pillow"),
    ],
)
def test_a_missing_optional_package_is_named(spec, module, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "paceline.training.data.images", raising=False)
    with refused("data") as caught:
        load(spec.format(tmp_path))
    assert package in caught.value.problem
