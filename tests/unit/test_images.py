"""Folders of images as data sets: classes, decoding, and files that are refused."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.training.data import Dataset, ShardedBatches, load, loader
from paceline.training.data.images import ImageSamples
from refusals import refused

RED = (255, 0, 0)
SHAPE = (3, 4, 6)


def save(path: Path, colour: tuple[int, ...] = RED, side: int = 5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).save(path)
    return path


NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)


def encoded(file_format: str, pixels: np.ndarray = NOISE) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, file_format)
    return stream.getvalue()


def make(root: Path, classes: dict[str, int]) -> Path:
    """Write a folder of images for each class; the n-th image has grey level n."""
    for name, count in classes.items():
        for i in range(count):
            save(root / name / f"{i:02}.png", (i, i, i))
    return root


def loaded(root: Path, shape: tuple[int, ...] | None = SHAPE, seed: int = 0) -> Dataset:
    return load(f"images:{root}", shape, seed)


def names(samples: object) -> list[str]:
    assert isinstance(samples, ImageSamples)
    return [f"{path.parent.name}/{path.name}" for path in samples.paths]


def one_image(path: Path, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    return ImageSamples((path,), torch.tensor([0]), shape)[0][0]


def test_class_folders_are_split(tmp_path: Path) -> None:
    data = loaded(make(tmp_path / "pets", {"dog": 10, "cat": 5, ".cache": 1}))
    (tmp_path / "pets" / "README.txt").write_text("notes")
    (tmp_path / "pets" / "cat" / ".DS_Store").write_bytes(b"\0")
    assert (data.name, data.num_classes, data.sample_shape) == ("pets", 2, SHAPE)
    assert (len(data.train), len(data.test)) == (12, 3)
    assert len({*names(data.train), *names(data.test)}) == 15
    for samples in (data.train, data.test):
        _, targets = samples.__getitems__(range(len(samples)))
        assert targets.dtype == torch.int64
        expected = [["cat", "dog"].index(name[:3]) for name in names(samples)]
        assert targets.tolist() == expected
    assert names(loaded(tmp_path / "pets").test) == names(data.test)
    assert names(loaded(tmp_path / "pets", seed=1).test) != names(data.test)


def test_train_and_test_folders_are_the_parts(tmp_path: Path) -> None:
    make(tmp_path / "train", {"a": 2, "b": 1})
    make(tmp_path / "test", {"b": 1, "a": 1})
    data = loaded(tmp_path, None)
    assert names(data.train) == ["a/00.png", "a/01.png", "b/00.png"]
    assert names(data.test) == ["a/00.png", "b/00.png"]
    assert data.train[0][0].shape == data.sample_shape == (3, 224, 224)


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "webp", "JPG"])
def test_every_format_is_read(tmp_path: Path, suffix: str) -> None:
    make(tmp_path, {"a": 2, "b": 2})
    save(tmp_path / "a" / f"red.{suffix}")
    assert len(loaded(tmp_path).train) == 3
    expected = torch.tensor([1.0, -1, -1]).view(3, 1, 1).expand(SHAPE)
    assert torch.allclose(one_image(tmp_path / "a" / f"red.{suffix}"), expected, atol=0.02)


TWO = {"a": 2, "b": 2}
BOTH = {"train/a": 1, "train/b": 1, "test/a": 1, "test/b": 1}
REFUSED = {  # images per class, other files, and the field: "data" or a path in the folder
    "no folder": (None, {}, "data"),
    "train alone": ({"train/a": 2, "train/b": 2}, {}, "data"),
    "test alone": ({"test/a": 2, "test/b": 2}, {}, "data"),
    "no class": ({}, {}, ""),
    "one class": ({"a": 2}, {}, ""),
    "an empty class": (TWO, {"c/.hidden": b""}, "c"),
    "a class for training alone": (BOTH | {"train/c": 1}, {}, "data"),
    "a class for testing alone": (BOTH | {"test/c": 1}, {}, "data"),
    "a note": (TWO, {"a/notes.txt": b""}, "a/notes.txt"),
    "a folder in a class": (TWO | {"a/inner": 1}, {}, "a/inner"),
    "a GIF": (TWO, {"a/x.gif": b""}, "a/x.gif"),
    "an image of no class": (TWO, {"x.png": encoded("PNG")}, "x.png"),
    "an empty image": (TWO, {"a/x.png": b""}, "a/x.png"),
    "text as an image": (TWO, {"a/x.png": b"not an image"}, "a/x.png"),
    "a GIF for training": (BOTH, {"train/b/x.png": encoded("GIF")}, "train/b/x.png"),
    "a GIF for testing": (BOTH, {"test/b/x.png": encoded("GIF")}, "test/b/x.png"),
    "16 bits": (TWO, {"a/x.png": encoded("PNG", np.full((4, 4), 1000, np.uint16))}, "a/x.png"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_and_files_are_refused_when_they_are_loaded(tmp_path: Path, case: str) -> None:
    classes, files, field = REFUSED[case]
    root = tmp_path / "root"
    if classes is not None:
        root.mkdir()
        make(root, classes)
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    with refused(field if field == "data" else root / field):
        loaded(root)


@pytest.mark.parametrize("side", [10, 13])  # Pillow warns above 81 pixels, refuses above 162
def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch, side: int) -> None:
    make(tmp_path, {"a": 2, "b": 2})
    bomb = save(tmp_path / "a" / "bomb.png", side=side)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 81)
    with refused(bomb):
        loaded(tmp_path)


@pytest.mark.parametrize("suffix", ["png", "jpeg", "bmp", "webp", "none"])
def test_a_file_that_is_cut_or_gone_is_refused_when_it_is_read(tmp_path: Path, suffix) -> None:
    path = tmp_path / f"cut.{suffix}"
    if suffix != "none":
        whole = encoded(suffix)
        path.write_bytes(whole[: len(whole) // 2])
    with refused(path):
        one_image(path)


def test_values_are_from_minus_one_to_one_in_order_channel_height_width(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    expected = pixels.astype(np.float32).transpose(2, 0, 1) / 255 * 2 - 1
    got = one_image(tmp_path / "x.png")
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)


def test_shrinking_averages_and_grey_weighs_the_colours(tmp_path: Path) -> None:
    # Pure point sampling would give only black or only white.
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / "x.png")
    assert one_image(tmp_path / "x.png", (1, 4, 4)).abs().max() < 0.1
    grey = one_image(save(tmp_path / "red.png"), (1, 4, 4))  # ITU-R BT.601: 0.299 of full red
    assert grey.mean().item() == pytest.approx(0.299 * 2 - 1, abs=0.01)


@pytest.mark.parametrize(
    ("mode", "colour"),
    [("L", (255,)), ("1", (1,)), ("RGBA", (255, 255, 255, 0)), ("LA", (255, 9)), ("P", (255,))],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_of_pixels_is_read(tmp_path: Path, mode: str, colour, channels: int) -> None:
    image = Image.new(mode, (5, 5), colour if len(colour) > 1 else colour[0])
    if mode == "P":
        image.putpalette([255, 255, 255] * 256)
    image.save(tmp_path / "x.png", transparency=bytes(256) if mode == "P" else None)
    got = one_image(tmp_path / "x.png", (channels, 4, 6))
    assert torch.equal(got, torch.ones(channels, 4, 6))


def test_batches_equal_single_images_and_those_of_worker_processes(tmp_path: Path) -> None:
    samples = loaded(make(tmp_path, {"a": 6, "b": 6})).train
    assert isinstance(samples, ImageSamples)
    inputs, targets = samples.__getitems__([7, 2])
    assert inputs.shape == (2, *SHAPE)
    assert inputs.is_contiguous()
    for row, index in enumerate([7, 2]):
        assert torch.equal(inputs[row], samples[index][0])
        assert torch.equal(targets[row], samples[index][1])
    batches = ShardedBatches(len(samples), 4, 0, 2, seed=0)
    here, there = (loader(samples, batches, num_workers=n) for n in (0, 1))
    for epoch in range(2):
        batches.set_epoch(epoch)
        for one, other in zip(here, there, strict=True):
            assert all(map(torch.equal, one, other))
    samples.paths[0].write_bytes(b"overwritten")
    batches = ShardedBatches(len(samples), 4, 0, 1, seed=0)
    with refused(samples.paths[0]):  # as the worker process reports it
        list(loader(samples, batches, num_workers=1))
