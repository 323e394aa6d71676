"""Text and arrays of tokens as data sets: what is read, how it is split, what is refused."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import InvalidInput
from paceline.data import Dataset, ShardedBatches, load, loader
from paceline.data.windows import MaskedTokens, TokenWindows


def tokens_of(samples: Any) -> bytes:
    assert isinstance(samples, TokenWindows | MaskedTokens)
    return bytes(samples.tokens.tolist())


def halves(data: Dataset) -> tuple[bytes, bytes]:
    return tokens_of(data.train), tokens_of(data.test)


class TestLibrary:
    def test_it_is_the_source_of_this_interpreter(self) -> None:
        data = load("text")
        train, test = halves(data)
        assert (data.name, data.num_classes, data.sample_shape) == ("text", 256, (256,))
        assert len(train) > 4_000_000
        assert len(test) == 128 * 1024
        folder = Path(sysconfig.get_path("stdlib"))
        both = train + test
        for name in ("argparse.py", "json/decoder.py", "asyncio/events.py", "typing.py"):
            assert folder.joinpath(name).read_bytes() in both
        assert Path(np.__file__).read_bytes() not in both  # an installed package
        assert b"class TestCase" in both  # unittest, but none of the library's own tests
        assert b"class RegressionTests(unittest.TestCase)" not in both

    def test_no_file_is_in_both_parts(self) -> None:
        train, test = halves(load("text"))
        folder = Path(sysconfig.get_path("stdlib"))
        # The limit cuts only the last file of the test part.
        whole = 0
        for file in (*folder.glob("*.py"), *folder.glob("[a-r]*/*.py")):
            text = file.read_bytes()
            if len(text) > 2000 and text in test:
                whole += 1
                assert text not in train, file
        assert whole

    def test_every_process_reads_the_same(self) -> None:
        code = (
            "import hashlib; from paceline.data import load; data = load('text', seed=3);"
            "print(*(hashlib.sha256(part.tokens).hexdigest() for part in (data.train, data.test)))"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
        found = subprocess.run(
            [sys.executable, "-c", code], check=True, env=environment, capture_output=True
        )
        ours = [sha256(part).hexdigest() for part in halves(load("text"))]
        assert found.stdout.decode().split() == ours

    def test_a_window_is_as_long_as_is_asked_for(self) -> None:
        data = load("text", (64,))
        inputs, targets = data.train.__getitems__([0, 9])
        train, _ = halves(data)
        assert data.sample_shape == (64,)
        assert bytes(inputs[1].tolist()) == train[9 * 64 : 10 * 64]
        assert bytes(targets[1].tolist()) == train[9 * 64 + 1 : 10 * 64 + 1]

    def test_without_source_it_says_so(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(InvalidInput, match=f"{tmp_path}: 0 files of text"):
            load("text")


class TestFile:
    def test_the_last_twentieth_is_for_testing(self, tmp_path: Path) -> None:
        text = bytes(range(256)) * 40  # no encoding has all of these
        path = tmp_path / "some, text"
        path.write_bytes(text)
        data = load(f"text:{path}", (16,))
        assert halves(data) == (text[: -len(text) // 20], text[-len(text) // 20 :])
        assert (data.name, data.num_classes) == (f"text:{path}", 256)

    def test_no_more_is_tested_than_takes_a_moment(self, tmp_path: Path) -> None:
        text = np.random.default_rng(0).integers(0, 256, 3_000_000).astype(np.uint8).tobytes()
        path = tmp_path / "text"
        path.write_bytes(text)
        assert halves(load(f"text:{path}")) == (text[: -128 * 1024], text[-128 * 1024 :])

    def test_it_is_mapped_and_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "large"
        with path.open("wb") as file:
            file.truncate(1 << 40)  # more than any memory; its blocks do not exist
        data = load(f"text:{path}")
        inputs, _ = data.train.__getitems__([len(data.train) - 1])
        assert inputs.tolist() == [[0] * 256]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b"x", "1 tokens for training are too few for one sample of 256"),
            (b"x" * 300, "15 tokens for testing are too few for one sample of 256"),
        ],
    )
    def test_too_little(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "text"
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match=f"{path}.*{message}") as error:
            load(f"text:{path}")
        assert "\n" not in str(error.value)

    def test_a_path_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=f"no file or folder {tmp_path}/none"):
            load(f"text:{tmp_path}/none")

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InvalidInput, match="no file or folder"):
            load(f"text:{tmp_path}/pipe")


def write_files(folder: Path, count: int, size: int = 500) -> dict[str, bytes]:
    """Write files with content of their own, some of them in folders of the folder."""
    texts = {}
    for number in range(count):
        name = f"{'deep/er/' if number % 3 else ''}{number:03}.txt"
        texts[name] = bytes([number]) * size
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(texts[name])
    return texts


class TestFolder:
    def test_one_in_twenty_is_for_testing_by_the_hash_of_its_path(self, tmp_path: Path) -> None:
        texts = write_files(tmp_path, 60)
        chosen = sorted(texts, key=lambda name: sha256(name.encode()).digest())[:3]
        train, test = halves(load(f"text:{tmp_path}"))
        assert test == b"".join(texts[name] for name in chosen)
        assert train == b"".join(texts[name] for name in sorted(texts) if name not in chosen)

    def test_it_may_be_moved_and_the_seed_does_not_matter(self, tmp_path: Path) -> None:
        write_files(tmp_path / "one", 25)
        write_files(tmp_path / "another", 25)
        first, second = load(f"text:{tmp_path}/one"), load(f"text:{tmp_path}/another", None, 9)
        assert halves(first) == halves(second)

    def test_hidden_files_and_links_to_folders_are_left_out(self, tmp_path: Path) -> None:
        write_files(tmp_path / "text", 25)
        before = halves(load(f"text:{tmp_path}/text"))
        (tmp_path / "text" / ".git").mkdir()
        (tmp_path / "text" / ".git" / "index").write_bytes(b"x" * 999)
        (tmp_path / "text" / ".hidden").write_bytes(b"x" * 999)
        (tmp_path / "text" / "loop").symlink_to(tmp_path / "text")
        (tmp_path / "text" / "dangling").symlink_to(tmp_path / "nothing")
        os.mkfifo(tmp_path / "text" / "pipe")
        assert halves(load(f"text:{tmp_path}/text")) == before

    def test_only_so_much_of_the_files_for_testing_is_taken(self, tmp_path: Path) -> None:
        write_files(tmp_path, 40, size=100_000)
        train, test = halves(load(f"text:{tmp_path}"))
        assert (len(train), len(test)) == (38 * 100_000, 128 * 1024)
        assert len(set(test)) == 2
        assert not set(train) & set(test)

    @pytest.mark.parametrize("count", [0, 1])
    def test_too_few_files(self, tmp_path: Path, count: int) -> None:
        write_files(tmp_path, count)
        with pytest.raises(InvalidInput, match=f"{tmp_path}: {count} files of text"):
            load(f"text:{tmp_path}")

    def test_more_than_the_memory(self, tmp_path: Path) -> None:
        write_files(tmp_path, 3)
        with (tmp_path / "large").open("wb") as file:
            file.truncate(1 << 42)
        with pytest.raises(InvalidInput, match=f"{tmp_path}: the text take 4,096.0 GiB"):
            load(f"text:{tmp_path}")


class TestMasked:
    def test_it_is_the_same_text_with_one_token_more(self) -> None:
        plain, masked = load("text", (32,)), load("masked-text", (32,), 5)
        assert halves(plain) == halves(masked)
        assert (masked.name, masked.num_classes, masked.sample_shape) == ("masked-text", 257, (32,))
        inputs, targets = masked.train.__getitems__(range(200))
        assert inputs.max() == 256
        assert targets.max() < 256
        assert isinstance(masked.train, MaskedTokens)
        assert masked.train.seed == 5

    def test_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_bytes(b"abcd" * 400)
        data = load(f"masked-text:{tmp_path}/text", (16,))
        assert (data.name, len(data.train)) == (f"masked-text:{tmp_path}/text", 95)


class TestTokens:
    def saved(self, tmp_path: Path, array: Any, name: str = "a.npy") -> Path:
        np.save(tmp_path / name, array)
        return tmp_path / name

    @pytest.mark.parametrize("kind", ["uint8", "uint16", "int32", "int64"])
    def test_the_vocabulary_is_the_highest_number_and_one(self, tmp_path: Path, kind: str) -> None:
        numbers = (np.arange(1000) % 97).astype(kind)
        data = load(f"tokens:{self.saved(tmp_path, numbers)}", (10,))
        assert (data.num_classes, data.sample_shape) == (97, (10,))
        assert (len(data.train), len(data.test)) == (94, 4)
        inputs, targets = data.test.__getitems__([0])
        assert inputs.tolist() == [numbers[950:960].tolist()]
        assert targets.tolist() == [numbers[951:961].tolist()]

    def test_the_highest_number_is_found_in_every_block(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr("paceline.data.text._BLOCK", 64)
        numbers = np.zeros(1000, np.uint16)
        numbers[999] = 40_000
        assert load(f"tokens:{self.saved(tmp_path, numbers)}", (10,)).num_classes == 40_001
        with pytest.raises(InvalidInput, match=r"a.npy has the token -3: tokens are .* from 0 up"):
            load(f"tokens:{self.saved(tmp_path, np.where(np.arange(900) == 800, -3, 1))}", (10,))

    def test_a_given_vocabulary_is_taken_and_watched(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path, np.arange(1000, dtype=np.uint16))
        data = load(f"tokens:{path},vocabulary=500", (10,))
        assert data.num_classes == 500
        data.train.__getitems__([0])
        with pytest.raises(InvalidInput, match=r"has the token 500, .* from 0 to 499"):
            data.train.__getitems__([50])

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
        ("array", "found"),
        [
            (np.zeros((30, 30), np.int64), "has 2 dimensions of int64"),
            (np.zeros((), np.int64), "has 0 dimensions of int64"),
            (np.zeros(900), "has 1 dimensions of float64"),
            (np.zeros(900, bool), "has 1 dimensions of bool"),
            (np.zeros(900, "m8[s]"), r"has 1 dimensions of timedelta64\[s\]"),
            (np.array([{}] * 900), "cannot be used"),
            (np.zeros(0, np.int64), ""),
        ],
    )
    def test_arrays_of_something_else(self, tmp_path: Path, array: Any, found: str) -> None:
        path = self.saved(tmp_path, array)
        with pytest.raises(InvalidInput, match=f"{path}.*{found}") as error:
            load(f"tokens:{path}")
        assert "\n" not in str(error.value)

    def test_files_that_are_no_array(self, tmp_path: Path) -> None:
        whole = self.saved(tmp_path, np.zeros(5000, np.uint16)).read_bytes()
        contents = {
            "empty": b"",
            "text": b"hello, world" * 99,
            "cut": whole[:-100],
            "header": whole[:60],
            "huge": whole.replace(b"(5000,)", b"(10**9,)"),
        }
        with zipfile.ZipFile(tmp_path / "several.npz", "w") as archive:
            archive.writestr("a.npy", whole)
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        for name in (*contents, "several.npz", "nothing.npy", ""):
            with pytest.raises(InvalidInput, match=r"a \.npy file with one dimension") as error:
                load(f"tokens:{tmp_path}/{name}")
            assert str(tmp_path) in str(error.value)
            assert "\n" not in str(error.value)

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        """It would run what it holds."""

        class Harmful:
            def __reduce__(self) -> tuple[Any, ...]:
                return (Path(tmp_path / "ran").touch, ())

        np.save(tmp_path / "a.npy", np.array([Harmful()] * 5, dtype=object), allow_pickle=True)
        with pytest.raises(InvalidInput, match=r"a\.npy cannot be used"):
            load(f"tokens:{tmp_path}/a.npy")
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("spec", ["text", "masked-text", "tokens:a.npy"])
def test_samples_of_another_shape_are_refused(spec: str) -> None:
    with pytest.raises(InvalidInput, match="sample shape 3x32x32: right would be one number"):
        load(spec, (3, 32, 32))
    with pytest.raises(InvalidInput, match="sizes of at least 1"):
        load(spec, (0,))


@pytest.mark.parametrize("spec", ["text:", "masked-text:", "tokens:", "tokens", "texts"])
def test_specs_without_what_they_need_list_the_forms(spec: str) -> None:
    with pytest.raises(InvalidInput, match=r"text, text:PATH, masked-text, .*tokens:PATH"):
        load(spec)


def test_an_epoch_takes_each_window_once_on_some_rank(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(np.arange(6000).astype(np.uint8).tobytes())
    data = load(f"text:{tmp_path}/text", (20,))
    seen = []
    for rank in range(3):
        batches = ShardedBatches(len(data.train), 12, rank, 3, seed=1)
        for inputs, targets in loader(data.train, batches):
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            seen += inputs.tolist()
    every, _ = data.train.__getitems__(range(len(data.train)))
    assert sorted(seen) == sorted(every.tolist())
