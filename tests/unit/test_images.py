import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.errors import InvalidInput
from paceline.data import Dataset, ShardedBatches, load, loader
from paceline.data.images import ImageSamples

RED, GREY = (255, 0, 0), (128, 128, 128)
SHAPE = (3, 4, 6)


def save(path: Path, colour: tuple[int, ...] = RED, mode: str = "RGB", side: int = 5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), colour if len(colour) > 1 else colour[0]).save(path)
    return path


def encoded(file_format: str) -> bytes:
    """A noisy image of 40x40 pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, file_format)
    return stream.getvalue()


def make(root: Path, classes: dict[str, int]) -> Path:
    """A folder for each class with so many images; the n-th is grey n."""
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


class TestFolders:
    def test_class_folders_are_split(self, tmp_path: Path) -> None:
        data = loaded(make(tmp_path / "pets", {"dog": 10, "cat": 5}))
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

    def test_train_and_test_folders(self, tmp_path: Path) -> None:
        make(tmp_path / "train", {"a": 2, "b": 1})
        make(tmp_path / "test", {"b": 1, "a": 1})
        data = loaded(tmp_path)
        assert names(data.train) == ["a/00.png", "a/01.png", "b/00.png"]
        assert names(data.test) == ["a/00.png", "b/00.png"]

    def test_default_shape(self, tmp_path: Path) -> None:
        data = loaded(make(tmp_path, {"a": 2, "b": 2}), shape=None)
        assert data.sample_shape == (3, 224, 224)
        assert data.train[0][0].shape == (3, 224, 224)

    @pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "webp", "JPG"])
    def test_formats(self, tmp_path: Path, suffix: str) -> None:
        make(tmp_path, {"a": 2, "b": 2})
        save(tmp_path / "a" / f"red.{suffix}")
        assert len(names(loaded(tmp_path).train)) + 2 == 5
        expected = torch.tensor([1.0, -1, -1]).view(3, 1, 1).expand(SHAPE)
        assert torch.allclose(one_image(tmp_path / "a" / f"red.{suffix}"), expected, atol=0.02)

    def test_hidden_files_and_loose_notes_are_no_classes(self, tmp_path: Path) -> None:
        make(tmp_path, {"a": 2, "b": 2, ".cache": 1})
        (tmp_path / "README.txt").write_text("notes")
        (tmp_path / "a" / ".DS_Store").write_bytes(b"\0")
        assert loaded(tmp_path).num_classes == 2

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=r"there is no folder .*nowhere"):
            loaded(tmp_path / "nowhere")

    @pytest.mark.parametrize(("here", "missing"), [("train", "test"), ("test", "train")])
    def test_only_one_half(self, tmp_path: Path, here: str, missing: str) -> None:
        make(tmp_path / here, {"a": 2, "b": 2})
        with pytest.raises(InvalidInput, match=f"there is no folder .*{missing}: give both"):
            loaded(tmp_path)

    @pytest.mark.parametrize("count", [0, 1])
    def test_too_few_classes(self, tmp_path: Path, count: int) -> None:
        make(tmp_path, {"a": 2} if count else {})
        with pytest.raises(InvalidInput, match=f"has {count} class folders, but at least two"):
            loaded(tmp_path)

    def test_empty_class(self, tmp_path: Path) -> None:
        make(tmp_path, {"a": 2, "b": 2})
        (tmp_path / "c").mkdir()
        with pytest.raises(InvalidInput, match=r"class folder .*/c has no images"):
            loaded(tmp_path)

    @pytest.mark.parametrize(
        ("train", "test", "message"),
        [
            ("abc", "ab", "class c is in .*train, but not in .*test"),
            ("ab", "abd", "class d is in .*test, but not in .*train"),
        ],
    )
    def test_classes_differ(self, tmp_path: Path, train: str, test: str, message: str) -> None:
        make(tmp_path / "train", dict.fromkeys(train, 1))
        make(tmp_path / "test", dict.fromkeys(test, 1))
        with pytest.raises(InvalidInput, match=message):
            loaded(tmp_path)

    @pytest.mark.parametrize("name", ["a/notes.txt", "a/inner/x.png", "a/x.gif"])
    def test_something_else_in_a_class_folder(self, tmp_path: Path, name: str) -> None:
        make(tmp_path, {"a": 2, "b": 2})
        save((tmp_path / name).with_suffix(".png")).rename(tmp_path / name)
        with pytest.raises(InvalidInput, match=r"is not an image: a class folder may hold \.png"):
            loaded(tmp_path)

    def test_image_outside_the_classes(self, tmp_path: Path) -> None:
        make(tmp_path, {"a": 2, "b": 2})
        save(tmp_path / "lost.png")
        with pytest.raises(InvalidInput, match=r"lost\.png belongs to no class"):
            loaded(tmp_path)

    @pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (10,), (1, 3, 4, 4)])
    def test_shape_that_is_no_image(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        with pytest.raises(InvalidInput, match=r"right would be 3xHxW \(colour\) or 1xHxW"):
            loaded(make(tmp_path, {"a": 2, "b": 2}), shape)


class TestDecoding:
    def test_values_from_minus_one_to_one_in_channel_height_width_order(
        self, tmp_path: Path
    ) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "x.png")
        expected = pixels.astype(np.float32).transpose(2, 0, 1) / 255 * 2 - 1
        got = one_image(tmp_path / "x.png")
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)

    def test_shrinking_averages(self, tmp_path: Path) -> None:
        # Pure point sampling would give only black or only white.
        board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
        Image.fromarray(board).save(tmp_path / "x.png")
        assert one_image(tmp_path / "x.png", (1, 4, 4)).abs().max() < 0.1

    @pytest.mark.parametrize(
        ("mode", "colour"),
        [("L", (255,)), ("1", (1,)), ("RGBA", (255, 255, 255, 0)), ("LA", (255, 9)), ("P", (255,))],
    )
    @pytest.mark.parametrize("channels", [1, 3])
    def test_modes(self, tmp_path: Path, mode: str, colour: tuple[int, ...], channels: int) -> None:
        image = Image.new(mode, (5, 5), colour if len(colour) > 1 else colour[0])
        if mode == "P":
            image.putpalette([255, 255, 255] * 256)
        image.save(tmp_path / "x.png", transparency=bytes(256) if mode == "P" else None)
        got = one_image(tmp_path / "x.png", (channels, 4, 6))
        assert torch.equal(got, torch.ones(channels, 4, 6))

    def test_grey_weighs_the_colours(self, tmp_path: Path) -> None:
        save(tmp_path / "x.png", RED)  # ITU-R BT.601: 0.299 of full red
        got = one_image(tmp_path / "x.png", (1, 4, 4))
        assert got.mean().item() == pytest.approx(0.299 * 2 - 1, abs=0.01)

    def test_batch_equals_single_images(self, tmp_path: Path) -> None:
        samples = loaded(make(tmp_path, {"a": 6, "b": 6})).train
        inputs, targets = samples.__getitems__([7, 2])
        assert inputs.shape == (2, *SHAPE)
        assert inputs.is_contiguous()
        for row, index in enumerate([7, 2]):
            assert torch.equal(inputs[row], samples[index][0])
            assert torch.equal(targets[row], samples[index][1])

    def test_worker_processes_give_the_same_batches(self, tmp_path: Path) -> None:
        samples = loaded(make(tmp_path, {"a": 6, "b": 6})).train
        batches = ShardedBatches(len(samples), 4, 0, 2, seed=0)
        here, there = (loader(samples, batches, num_workers=n) for n in (0, 1))
        for epoch in range(2):
            batches.set_epoch(epoch)
            for (inputs, targets), (inputs2, targets2) in zip(here, there, strict=True):
                assert torch.equal(inputs, inputs2)
                assert torch.equal(targets, targets2)


class TestBadFiles:
    @pytest.mark.parametrize("content", [b"", b"not an image", encoded("GIF")])
    @pytest.mark.parametrize("half", ["train", "test"])
    def test_found_when_loading(self, tmp_path: Path, content: bytes, half: str) -> None:
        for each in ("train", "test"):
            make(tmp_path / each, {"a": 1, "b": 1})
        (tmp_path / half / "b" / "bad.png").write_bytes(content)
        with pytest.raises(InvalidInput, match=f"{half}/b/bad.png is not a PNG, JPEG, BMP or WebP"):
            loaded(tmp_path)

    @pytest.mark.parametrize("suffix", ["png", "jpeg", "bmp", "webp"])
    def test_truncated_file_is_named_when_it_is_read(self, tmp_path: Path, suffix: str) -> None:
        whole = encoded(suffix)
        path = tmp_path / f"cut.{suffix}"
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InvalidInput, match=rf"cut\.{suffix} is not a"):
            one_image(path)

    def test_file_that_disappeared(self, tmp_path: Path) -> None:
        with pytest.raises(
            InvalidInput, match=r"gone\.png is not a readable image: .*No such file"
        ):
            one_image(tmp_path / "gone.png")

    @pytest.mark.parametrize("side", [10, 13])  # Pillow warns above 81 pixels, refuses above 162
    def test_decompression_bomb(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int
    ) -> None:
        make(tmp_path, {"a": 2, "b": 2})
        save(tmp_path / "a" / "bomb.png", side=side)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 81)
        with pytest.raises(InvalidInput, match=r"bomb\.png has too many pixels"):
            loaded(tmp_path)

    def test_more_than_eight_bits(self, tmp_path: Path) -> None:
        make(tmp_path, {"a": 2, "b": 2})
        Image.fromarray(np.full((4, 4), 1000, np.uint16)).save(tmp_path / "a" / "deep.png")
        with pytest.raises(InvalidInput, match=r"deep\.png has more than 8 bits"):
            loaded(tmp_path)

    def test_broken_file_in_a_worker_process(self, tmp_path: Path) -> None:
        samples = loaded(make(tmp_path, {"a": 6, "b": 6})).train
        assert isinstance(samples, ImageSamples)
        samples.paths[0].write_bytes(b"overwritten")
        steps = loader(samples, ShardedBatches(len(samples), 4, 0, 1, seed=0), num_workers=1)
        with pytest.raises(InvalidInput, match=f"{samples.paths[0]} is not a PNG"):
            list(steps)
