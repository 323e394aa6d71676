"""Data sets of text and of token arrays, and windows of tokens."""

import os
import sysconfig
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.training.data import Dataset, load
from paceline.training.data.text import IGNORED, MaskedTokens, TokenWindows
from refusals import refused


def tokens_of(samples: Any) -> bytes:
    assert isinstance(samples, TokenWindows | MaskedTokens)
    return bytes(samples.tokens.tolist())


def halves(data: Dataset) -> tuple[bytes, bytes]:
    return tokens_of(data.train), tokens_of(data.test)


class TestLibrary:
    """Data set `text`: the source code of the standard library."""

    def test_it_has_the_modules_and_neither_tests_nor_packages(self) -> None:
        data = load("text")
        train, test = halves(data)
        assert (data.name, data.num_classes, data.sample_shape) == ("text", 256, (256,))
        assert len(train) > 4_000_000
        assert len(test) == 128 * 1024
        folder = Path(sysconfig.get_path("stdlib"))
        both = train + test
        for name in ("argparse.py", "json/decoder.py", "asyncio/events.py", "typing.py"):
            assert folder.joinpath(name).read_bytes() in both
        assert Path(np.__file__).read_bytes() not in both
        assert b"class TestCase" in both  # unittest, but none of the library's own tests
        assert b"class RegressionTests(unittest.TestCase)" not in both


class TestFile:
    def test_the_last_twentieth_is_for_testing(self, tmp_path: Path) -> None:
        text = bytes(range(256)) * 40  # all byte values, so not UTF-8
        path = tmp_path / "some, text"
        path.write_bytes(text)
        data = load(f"text:{path}", (16,))
        assert halves(data) == (text[: -len(text) // 20], text[-len(text) // 20 :])
        assert (data.name, data.num_classes) == (f"text:{path}", 256)
        masked = load(f"masked-text:{path}", (16,), 5)
        assert halves(masked) == halves(data)
        assert (masked.name, masked.num_classes) == (f"masked-text:{path}", 257)
        assert (len(masked.train), masked.train.seed) == (len(data.train) + 1, 5)

    def test_it_is_mapped_and_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "large"
        with path.open("wb") as file:
            file.truncate(1 << 40)  # more than any memory; its blocks do not exist
        data = load(f"text:{path}")
        inputs, _ = data.train.__getitems__([len(data.train) - 1])
        assert inputs.tolist() == [[0] * 256]

    def test_too_little_a_missing_file_and_a_pipe_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        for content in (b"", b"x", b"x" * 300):  # 15 of 300 are for testing
            path.write_bytes(content)
            with refused(path):
                load(f"text:{path}")
        os.mkfifo(tmp_path / "pipe")  # opening it would block
        for name in ("none", "pipe"):
            with refused("data"):
                load(f"text:{tmp_path}/{name}")


def write_files(folder: Path, count: int) -> dict[str, bytes]:
    """Write files of different contents, some of them in subfolders; return their contents."""
    texts = {}
    for number in range(count):
        name = f"{'deep/er/' if number % 3 else ''}{number:03}.txt"
        texts[name] = bytes([number]) * 500
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(texts[name])
    return texts


class TestFolder:
    def test_one_in_twenty_is_for_testing_by_the_hash_of_its_path(self, tmp_path: Path) -> None:
        texts = write_files(tmp_path / "one", 60)
        chosen = sorted(texts, key=lambda name: sha256(name.encode()).digest())[:3]
        train, test = halves(load(f"text:{tmp_path}/one"))
        assert test == b"".join(texts[name] for name in chosen)
        assert train == b"".join(texts[name] for name in sorted(texts) if name not in chosen)
        write_files(tmp_path / "moved", 60)
        assert halves(load(f"text:{tmp_path}/moved", None, 9)) == (train, test)

    def test_hidden_files_and_links_to_folders_are_left_out(self, tmp_path: Path) -> None:
        folder = tmp_path / "text"
        write_files(folder, 25)
        before = halves(load(f"text:{folder}"))
        (folder / ".git").mkdir()
        for name in (".git/index", ".hidden"):
            (folder / name).write_bytes(b"x" * 999)
        (folder / "loop").symlink_to(folder)
        (folder / "dangling").symlink_to(tmp_path / "nothing")
        os.mkfifo(folder / "pipe")
        assert halves(load(f"text:{folder}")) == before

    @pytest.mark.parametrize(("count", "large"), [(0, False), (1, False), (3, True)])
    def test_too_few_files_and_more_than_the_memory_are_refused(self, tmp_path, count, large):
        write_files(tmp_path, count)
        if large:
            with (tmp_path / "large").open("wb") as file:
                file.truncate(1 << 42)
        with refused(tmp_path):
            load(f"text:{tmp_path}")


def saved(tmp_path: Path, array: Any) -> Path:
    np.save(tmp_path / "a.npy", array)
    return tmp_path / "a.npy"


class TestTokens:
    @pytest.mark.parametrize(
        "kind", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", ">u2"]
    )
    def test_the_vocabulary_is_the_highest_number_plus_one(self, tmp_path: Path, kind: str) -> None:
        numbers = (np.arange(1000) % 97).astype(kind)
        data = load(f"tokens:{saved(tmp_path, numbers)}", (10,))
        assert (data.num_classes, data.sample_shape) == (97, (10,))
        assert (len(data.train), len(data.test)) == (94, 4)
        inputs, targets = data.test.__getitems__([0])
        assert inputs.tolist() == [numbers[950:960].tolist()]
        assert targets.tolist() == [numbers[951:961].tolist()]

    def test_all_tokens_are_searched_for_extremes(self, tmp_path: Path) -> None:
        numbers = np.zeros(1000, np.uint16)
        numbers[999] = 40_000
        assert load(f"tokens:{saved(tmp_path, numbers)}", (10,)).num_classes == 40_001
        path = saved(tmp_path, np.where(np.arange(900) == 800, -3, 1))
        with refused(path):
            load(f"tokens:{path}", (10,))

    def test_tokens_outside_of_a_given_vocabulary_are_refused(self, tmp_path: Path) -> None:
        numbers = np.arange(1000)
        numbers[205] = -1
        path = saved(tmp_path, numbers)
        data = load(f"tokens:{path},vocabulary=500", (10,))
        assert data.num_classes == 500
        data.train.__getitems__([0, 48])
        for wrong in (20, 49):
            with refused(path):
                data.train.__getitems__([0, wrong])

    def test_it_is_mapped_and_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "large.npy"
        shape = (1 << 39,)
        with path.open("wb") as file:
            header = {"descr": "<u2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 2 * shape[0])
        data = load(f"tokens:{path},vocabulary=50257", (1024,))
        inputs, _ = data.train.__getitems__([len(data.train) - 1])
        assert inputs.shape == (1, 1024)

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((30, 30), np.int64),
            np.zeros((), np.int64),
            np.zeros(900),
            np.zeros(900, bool),
            np.zeros(900, "m8[s]"),
            np.zeros(0, np.int64),
        ],
        ids=lambda array: f"{array.dtype}{array.shape}",
    )
    def test_arrays_other_than_integer_rows_are_refused(self, tmp_path: Path, array: Any) -> None:
        path = saved(tmp_path, array)
        with refused(path):
            load(f"tokens:{path}")

    def test_files_other_than_arrays_are_refused(self, tmp_path: Path) -> None:
        whole = saved(tmp_path, np.zeros(5000, np.uint16)).read_bytes()
        contents = {
            "empty": b"",
            "text": b"hello, world" * 99,
            "cut": whole[:-100],
            "header": whole[:60],
            "huge": whole.replace(b"(5000,)", b"(10**9,)"),
            "type": whole.replace(b"'<u2'", b"('<u2',)").replace(b"   \n", b"\n"),
            "archive": b"PK\x03\x04" + whole,
        }
        with zipfile.ZipFile(tmp_path / "several.npz", "w") as archive:
            archive.writestr("a.npy", whole)
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        for name in (*contents, "several.npz"):
            with refused(tmp_path / name):
                load(f"tokens:{tmp_path}/{name}")
        for name in ("nothing.npy", ""):
            with refused("data"):
                load(f"tokens:{tmp_path}/{name}")

    def test_a_file_of_python_2_is_read(self, tmp_path: Path) -> None:
        path = saved(tmp_path, np.arange(1000, dtype=np.uint16))
        path.write_bytes(path.read_bytes().replace(b"(1000,), }  ", b"(1000L,), } "))
        assert load(f"tokens:{path}", (10,)).num_classes == 1000

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        """Unpickling would run code."""

        class Harmful:
            def __reduce__(self) -> tuple[Any, ...]:
                return (Path(tmp_path / "ran").touch, ())

        path = saved(tmp_path, np.array([Harmful()] * 5, dtype=object))
        with refused(path):
            load(f"tokens:{path}")
        assert not (tmp_path / "ran").exists()


def windows(count: int, length: int) -> TokenWindows:
    return TokenWindows(np.arange(count) % 251, length, 256, "numbers")


def masked(
    length: int = 40, seed: int = 3, count: int = 4000, vocabulary: int = 50
) -> MaskedTokens:
    tokens = np.random.default_rng(0).integers(0, vocabulary, count)
    return MaskedTokens(tokens.astype(np.uint16), length, vocabulary, "numbers", seed)


class TestWindows:
    @given(st.integers(0, 60), st.integers(1, 9))
    def test_they_are_adjacent_and_use_each_token_once(self, count: int, length: int):
        samples = windows(count, length)
        inputs, targets = samples.__getitems__(range(len(samples)))
        used = len(samples) * length
        assert inputs.shape == targets.shape == (len(samples), length)
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
        assert inputs.flatten().tolist() == samples.tokens[:used].tolist()
        assert targets.flatten().tolist() == samples.tokens[1 : used + 1].tolist()
        assert max(0, count - 1) - used < length  # another window would not fit

    def test_a_batch_is_its_samples_in_the_order_asked_for(self) -> None:
        samples = windows(100, 7)
        inputs, targets = samples.__getitems__([5, 0, -1, 5])
        for row, index in enumerate([5, 0, 13, 5]):
            one_input, one_target = samples[index]
            assert torch.equal(inputs[row], one_input)
            assert torch.equal(targets[row], one_target)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        inputs.fill_(9)  # a batch is a copy of the tokens
        assert samples.tokens[:4].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("samples", [windows(50, 7), masked()], ids=["plain", "masked"])
    def test_indices_beyond_the_samples_raise(self, samples: TokenWindows | MaskedTokens) -> None:
        for index in (len(samples), -len(samples) - 1):
            with pytest.raises(IndexError):
                samples[index]
        inputs, _ = samples.__getitems__([])
        assert inputs.shape == (0, samples.length)


class TestMasked:
    def test_fifteen_per_cent_of_the_tokens_are_targets(self) -> None:
        samples = masked()
        inputs, targets = samples.__getitems__(range(len(samples)))
        plain = torch.from_numpy(samples.tokens.astype(np.int64)).view(100, 40)
        assert inputs.shape == targets.shape == (100, 40)
        asked = targets != IGNORED
        assert asked.sum(1).tolist() == [6] * 100
        assert torch.equal(targets[asked], plain[asked])
        assert torch.equal(inputs[~asked], plain[~asked])

    @pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 1), (3, 1), (10, 2), (256, 38)])
    def test_at_least_one_token_is_masked(self, length: int, count: int) -> None:
        _, targets = masked(length)[0]
        assert int((targets != IGNORED).sum()) == count

    def test_tokens_are_hidden_replaced_or_kept_in_the_published_shares(self) -> None:
        samples = masked(count=400_000)
        inputs, targets = samples.__getitems__(range(len(samples)))
        asked = targets != IGNORED
        found, wanted = inputs[asked], targets[asked]
        total = len(found)  # 60,000
        hidden, kept = found == samples.vocabulary, found == wanted
        # One in 50 random tokens is the original one. Three standard deviations are below 0.4 %.
        assert hidden.sum() / total == pytest.approx(0.8, abs=0.005)
        assert kept.sum() / total == pytest.approx(0.1 + 0.1 / 50, abs=0.005)
        random = found[~hidden & ~kept]
        assert random.unique().numel() == 50
        assert torch.bincount(random).min() > 0.7 * len(random) / 50
        # All positions are masked equally often.
        assert asked.float().mean(0).std() < 0.02

    def test_seed_and_index_alone_decide_what_is_masked(self) -> None:
        _, targets = masked().__getitems__([7, 3, 7])
        assert torch.equal(targets[0], targets[2])
        assert torch.equal(targets[0], masked()[7][1])
        assert torch.equal(masked()[-1][1], masked()[99][1])
        for other in (masked(seed=4)[7][1], targets[1]):
            assert not torch.equal(other != IGNORED, targets[0] != IGNORED)

    def test_what_is_masked_stays_the_same_in_later_versions(self) -> None:
        """All ranks must mask the same tokens, and so must a resumed run."""
        inputs, targets = MaskedTokens(np.arange(80), 40, 80, "numbers", 2)[1]
        places = [7, 14, 26, 33, 35, 39]
        assert (targets != IGNORED).nonzero().flatten().tolist() == places
        # The first is kept, two are random, and three are hidden.
        assert inputs[places].tolist() == [47, 80, 80, 53, 59, 80]
