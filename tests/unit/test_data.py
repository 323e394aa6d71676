import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import paceline.data
from paceline.core.errors import InvalidInput
from paceline.data import Dataset, ShardedBatches, load, loader
from paceline.data.dataset import TensorSamples
from paceline.data.sampler import stratified_split

# The number of images of each digit, from the data set's published description.
DIGIT_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def tensors(samples: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(samples, TensorSamples)
    return samples.inputs, samples.targets


def counted(num_samples: int) -> TensorSamples:
    numbers = torch.arange(num_samples)
    return TensorSamples(numbers.float().unsqueeze(1), numbers)


def naive_bilinear(image: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Bilinear interpolation between pixel centres, edge pixels repeated, one value at a time."""
    result = np.empty((height, width), np.float32)
    for y, x in np.ndindex(height, width):
        row = np.clip((y + 0.5) * image.shape[0] / height - 0.5, 0, image.shape[0] - 1)
        column = np.clip((x + 0.5) * image.shape[1] / width - 0.5, 0, image.shape[1] - 1)
        top, left = int(row), int(column)
        bottom, right = min(top + 1, image.shape[0] - 1), min(left + 1, image.shape[1] - 1)
        down, across = row - top, column - left
        upper = image[top, left] * (1 - across) + image[top, right] * across
        lower = image[bottom, left] * (1 - across) + image[bottom, right] * across
        result[y, x] = upper * (1 - down) + lower * down
    return result


class TestLoader:
    @pytest.mark.parametrize("world_size", [1, 3])
    def test_batches_are_those_of_the_sampler(self, world_size: int) -> None:
        samples, seen = counted(50), []
        for rank in range(world_size):
            batches = ShardedBatches(50, 12, rank, world_size, seed=1)
            batches.set_epoch(2)
            got = [targets.tolist() for _, targets in loader(samples, batches)]
            assert got == list(batches)
            seen += list(chain.from_iterable(got))
        assert sorted(seen) == list(range(50))

    def test_inputs_and_targets_stay_together(self) -> None:
        steps = loader(counted(20), ShardedBatches(20, 7, 0, 1, seed=0))
        assert len(steps) == 3
        for inputs, targets in steps:
            assert torch.equal(inputs.squeeze(1), targets.float())

    def test_global_random_state_is_left_alone(self) -> None:
        steps = loader(counted(20), ShardedBatches(20, 5, 0, 1, seed=0))
        before = torch.get_rng_state()
        list(steps)
        assert torch.equal(torch.get_rng_state(), before)

    def test_batches_made_for_other_samples(self) -> None:
        with pytest.raises(InvalidInput, match="made for 30 samples, but there are 20"):
            loader(counted(20), ShardedBatches(30, 5, 0, 1, seed=0))

    def test_worker_processes_for_samples_in_memory(self) -> None:
        with pytest.raises(InvalidInput, match="num_workers must be 0, not 2"):
            loader(counted(20), ShardedBatches(20, 5, 0, 1, seed=0), num_workers=2)


def test_tensor_samples_must_pair_up() -> None:
    with pytest.raises(ValueError, match="3 inputs but 2 targets"):
        TensorSamples(torch.zeros(3, 1), torch.zeros(2))


class TestStratifiedSplit:
    def test_each_class_gives_a_fifth(self) -> None:
        targets = np.repeat(np.arange(4), [50, 7, 2, 1])
        train, test = stratified_split(targets, seed=0)
        assert sorted([*train, *test]) == list(range(60))
        assert np.bincount(targets[test], minlength=4).tolist() == [10, 1, 1, 0]

    def test_the_seed_decides(self) -> None:
        targets = np.zeros(100, np.int64)
        tests = [stratified_split(targets, seed)[1].tolist() for seed in (0, 0, 1)]
        assert tests[0] == tests[1] != tests[2]

    def test_nothing_left_for_testing(self) -> None:
        with pytest.raises(InvalidInput, match="no class has two samples"):
            stratified_split(np.arange(5), seed=0)


class TestDigits:
    def test_all_the_handwriting_is_there_and_normalised(self) -> None:
        data = load("digits")
        (inputs, targets), (test_inputs, test_targets) = tensors(data.train), tensors(data.test)
        assert (data.name, data.num_classes, data.sample_shape) == ("digits", 10, (1, 8, 8))
        assert inputs.shape == (1438, 1, 8, 8)
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
        counts = torch.bincount(torch.cat([targets, test_targets])).tolist()
        assert counts == DIGIT_COUNTS
        test_counts = torch.bincount(test_targets).tolist()
        assert test_counts == [round(count / 5) for count in DIGIT_COUNTS]
        assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
        assert inputs.std().item() == pytest.approx(1, abs=1e-3)
        assert test_inputs.unique().numel() == 17  # 0..16, still only scaled

    def test_train_and_test_are_disjoint_parts_of_the_source(self) -> None:
        from sklearn.datasets import load_digits

        data = load("digits", seed=4)
        source = load_digits()
        assert len(np.unique(source.data, axis=0)) == 1797  # every image is unlike all others
        (inputs, targets), (test_inputs, test_targets) = tensors(data.train), tensors(data.test)
        both = torch.cat([inputs, test_inputs]).flatten(1)
        grey = ((both - both.min()) / (both.max() - both.min()) * 16).round().int().tolist()
        label_of = {tuple(map(int, x)): y for x, y in zip(source.data, source.target, strict=True)}
        labels = torch.cat([targets, test_targets]).tolist()
        assert {tuple(image): label for image, label in zip(grey, labels, strict=True)} == label_of

    def test_flat(self) -> None:
        flat, _ = tensors(load("digits", (64,)).train)
        images, _ = tensors(load("digits").train)
        assert torch.equal(flat, images.reshape(-1, 64))

    @pytest.mark.parametrize("size", [(13, 16), (5, 4), (8, 8)])
    def test_resized_with_repeated_channels(self, size: tuple[int, int]) -> None:
        images, _ = tensors(load("digits").test)
        data = load("digits", (3, *size))
        inputs, _ = data.test.__getitems__([3, 0])
        assert inputs.shape == (2, 3, *size)
        assert inputs.is_contiguous()
        for got, index in zip(inputs, [3, 0], strict=True):
            expected = naive_bilinear(images[index, 0].numpy(), *size)
            for channel in got:
                np.testing.assert_allclose(channel.numpy(), expected, atol=1e-5)

    def test_repeated_channels_take_no_memory(self) -> None:
        inputs, _ = tensors(load("digits", (3, 16, 16)).train)
        assert inputs.untyped_storage().nbytes() == len(inputs) * 16 * 16 * 4

    @pytest.mark.parametrize("shape", [(63,), (8, 8), (2, 8, 8), (1, 1, 8, 8)])
    def test_shape_that_does_not_fit(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InvalidInput, match=r"right would be 64, 1xHxW or 3xHxW"):
            load("digits", shape)


class TestSynthetic:
    def test_defaults(self) -> None:
        data = load("synthetic", (2,))
        assert (len(data.train), len(data.test), data.num_classes) == (512, 128, 10)
        assert load("synthetic:samples=10").sample_shape == (3, 224, 224)

    def test_options(self) -> None:
        data = load("synthetic:1x6x5,classes=4,samples=30")
        inputs, targets = tensors(data.train)
        assert data.sample_shape == (1, 6, 5)
        assert inputs.shape == (30, 1, 6, 5)
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

    def test_convolutions_learn_it(self) -> None:
        data = load("synthetic:3x32x32,classes=4,samples=128")
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, stride=4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.LazyLinear(4),
        )
        inputs, targets = tensors(data.train)
        test_inputs, test_targets = tensors(data.test)
        model(inputs[:1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        assert (model(test_inputs).argmax(1) == test_targets).float().mean() > 0.8

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("3x0x4", "cannot read '3x0x4'"),
            ("3x4,5x6", "cannot read '5x6'"),
            ("classes=x", "cannot read 'classes=x'"),
            ("classes=3,classes=4", "cannot read 'classes=4'"),
            ("colours=3", "cannot read 'colours=3'"),
            ("3x4,", "cannot read ''"),
            ("-3", "cannot read '-3'"),
            ("samples=" + "9" * 5000, "cannot read"),
            ("\u0663", "cannot read"),  # a digit, but not an ASCII one
            ("classes=1", "classes must be at least 2"),
            ("samples=9", "9 samples cannot cover 10 classes"),
            ("99999x99999,samples=100000", r"synthetic: 125000 samples.*GiB.*this machine has"),
        ],
    )
    def test_bad_options(self, options: str, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            load(f"synthetic:{options}")

    def test_shape_of_the_spec_and_of_the_model_differ(self) -> None:
        with pytest.raises(InvalidInput, match="samples are 3x4, but the model takes 4x3"):
            load("synthetic:3x4", (4, 3))
        assert load("synthetic:3x4", (3, 4)).sample_shape == (3, 4)


class TestLoad:
    @pytest.mark.parametrize(
        "spec", ["", "mnist", "digits:", "libsvm", "libsvm:", "images:", "Digits", "syntheti"]
    )
    def test_unknown_spec_lists_the_forms(self, spec: str) -> None:
        forms = r"digits, libsvm:PATH, images:FOLDER, synthetic:3x224x224,classes=10,samples=512"
        with pytest.raises(InvalidInput, match=forms):
            load(spec)

    @pytest.mark.parametrize("shape", [(), (0,), (3, -1, 4)])
    def test_impossible_sample_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InvalidInput, match="sizes of at least 1"):
            load("synthetic", shape)

    def test_negative_seed(self) -> None:
        with pytest.raises(InvalidInput, match="seed must be 0 or more, not -1"):
            load("digits", None, -1)

    @pytest.mark.parametrize(
        ("spec", "module", "package"),
        [
            ("digits", "sklearn", "scikit-learn"),
            ("libsvm:{}", "sklearn.datasets", "scikit-learn"),
            ("images:{}", "PIL", "Pillow"),
        ],
    )
    def test_missing_optional_package(
        self,
        spec: str,
        module: str,
        package: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        for ours in ("paceline.data.images", "paceline.data.images"):
            monkeypatch.delitem(sys.modules, ours, raising=False)
        with pytest.raises(InvalidInput, match=rf"needs {package}: install paceline\[data\]"):
            load(spec.format(tmp_path))

    def test_public_names(self) -> None:
        names = {"BalancedSampler", "Collate", "Dataset", "ShardedBatches", "load", "loader"}
        assert names == set(paceline.data.__all__)
        assert paceline.data.Dataset is Dataset
        assert not hasattr(paceline.data, "nothing")
