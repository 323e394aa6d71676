"""Define the fuzzed parsers of data sets and checkpoints."""

import bz2
import json
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

from fuzzing.changes import BYTES, JSON, TEXT, Change
from fuzzing.parser import Parser, on_file
from paceline.checkpoints import json_values, manifest
from paceline.checkpoints.folder import CheckpointFolder
from paceline.core.errors import InvalidInput
from paceline.training.data.images import load_images
from paceline.training.data.libsvm import load_libsvm
from paceline.training.data.text import load_tokens

_VALUES = {"step": 3, "rate": 0.5, "order": (1, 2), "best": float("inf"), "by": {1: "a"}, "x": []}


_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PNG")


def _libsvm_seeds(folder: Path) -> list[bytes]:
    rows = [f"{1 if i % 2 else -1} 1:{i / 7:.4g} 3:0.5 {4 + i % 5}:1.25" for i in range(30)]
    more = [f"{i % 3} 2:1e-3 7:{i}  # a comment" for i in range(20)]
    return ["\n".join(rows).encode() + b"\n", "\n".join(more).encode()]


def _libsvm(path: Path) -> object:
    found = load_libsvm(str(path), None, 0)
    return found.train[0], found.num_classes


def _of_the_text(change: Change) -> Change:
    def packed(data: bytes) -> bytes:
        try:
            text = bz2.decompress(data)
        except (OSError, ValueError):
            return data
        return bz2.compress(change(text[: 2**16]))

    return packed


def _bomb(piece: bytes, nbytes: int) -> Change:
    """Replace the input by a bz2 file that expands to `nbytes` bytes."""
    return lambda _: bz2.compress(piece * (nbytes // len(piece)))


_BOMBS = st.builds(
    _bomb,
    st.sampled_from((b"\n", b" ", b"1 1:1\n", b"9", b"1 1:1 ")),
    st.sampled_from((10**5, 10**6, 10**7)),
)


def _image_seeds(folder: Path) -> list[bytes]:
    pixels = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    found = []
    for kind, mode in zip(_FORMATS, ("RGB", "L", "RGB", "RGB", "P"), strict=True):
        file = BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, kind)
        found.append(file.getvalue())
    return found


def _huge(width: int, height: int) -> Change:
    """Replace the size in a PNG's header, and update the checksum."""

    def change(data: bytes) -> bytes:
        if data[:4] != b"\x89PNG":
            return data
        sizes = width.to_bytes(4, "big") + height.to_bytes(4, "big")
        head = b"IHDR" + sizes + data[24:29]
        return data[:12] + head + zlib.crc32(head).to_bytes(4, "big") + data[33:]

    return change


_PIXELS = st.sampled_from((0, 1, 2**13, 2**15, 2**31 - 1))


def _image(data: bytes, folder: Path) -> object:
    if not (folder / "a").exists():
        for name in ("a", "b"):
            (folder / name).mkdir()
            for number in range(5):
                (folder / name / f"{number}.png").write_bytes(_image_seeds(folder)[0])
    (folder / "a" / "0.png").write_bytes(data)
    found = load_images(str(folder), (3, 8, 8), 0)
    for part in (found.train, found.test):
        part.__getitems__(range(len(part)))
    return found.num_classes


def _token_seeds(folder: Path) -> list[bytes]:
    found = []
    for kind in (np.uint16, np.int64):
        file = BytesIO()
        np.save(file, np.arange(4000, dtype=kind) % 50)
        found.append(file.getvalue())
    return found


def _checkpoint_seeds(folder: Path) -> list[bytes]:
    """Return the files of a checkpoint, each preceded by a line with its name."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}
    path = CheckpointFolder(folder / "checkpoints").write(
        7, {"model.safetensors": tensors, "progress.json": _VALUES}
    )
    return [one.name.encode() + b"\n" + one.read_bytes() for one in sorted(path.iterdir())]


def _behind_the_name(of_bytes: Change, of_json: Change) -> Change:
    def change(data: bytes) -> bytes:
        name, newline, rest = data.partition(b"\n")
        own = of_bytes if name.endswith(b".safetensors") else of_json
        return name + newline + own(rest)

    return change


_NAMED = st.builds(_behind_the_name, BYTES, JSON)


def _checkpoint(data: bytes, folder: Path) -> object:
    """Read a checkpoint with one changed file and, except in some manifests, valid checksums."""
    name, _, rest = data.partition(b"\n")
    found = CheckpointFolder(folder / "checkpoints")
    path = found.path / "step-00000007"
    if not path.exists():
        _checkpoint_seeds(folder)
        _WHOLE.update({one.name: one.read_bytes() for one in path.iterdir()})
    for other, whole in _WHOLE.items():
        (path / other).write_bytes(whole)
    (path / name.decode()).write_bytes(rest)
    if name.decode() == manifest.MANIFEST:
        head = rest[: rest.rfind(b' "crc32"')]
        (path / manifest.MANIFEST).write_bytes(
            head + b' "crc32": "%08x"\n}\n' % zlib.crc32(head) if zlib.crc32(rest) % 2 else rest
        )
    else:
        entries = {
            one.name: manifest.FileEntry(one.stat().st_size, f"{zlib.crc32(one.read_bytes()):08x}")
            for one in path.iterdir()
            if one.name != manifest.MANIFEST
        }
        whole = manifest.Manifest(7, entries)
        (path / manifest.MANIFEST).write_bytes(manifest.to_bytes(whole))
    loaded = found.latest()
    return loaded.tensors("model"), loaded.json("progress")


_WHOLE: dict[str, bytes] = {}


def _json_values(data: bytes, folder: Path) -> object:
    try:
        return (json_values.loads(data),)
    except ValueError as error:  # its callers convert it to InvalidInput
        raise InvalidInput.of(str(error)) from None


_JSON_VALUES = [json_values.dumps("values", _VALUES), json.dumps({"a": [1, 2]}).encode()]
PARSERS = (
    Parser("libsvm", 3, _libsvm_seeds, TEXT, on_file("data.libsvm", _libsvm)),
    Parser("packed libsvm", 1, lambda one: [bz2.compress(text) for text in _libsvm_seeds(one)],
        BYTES | _BOMBS | TEXT.map(_of_the_text), on_file("data.bz2", _libsvm),
    ),
    Parser("images", 2, _image_seeds, BYTES | st.builds(_huge, _PIXELS, _PIXELS), _image),
    Parser("tokens", 1, _token_seeds, TEXT,
        on_file("tokens.npy", lambda path: load_tokens(str(path), (16,), 0).num_classes),
    ),
    Parser("checkpoint", 3, _checkpoint_seeds, _NAMED, _checkpoint),
    Parser("checkpoint values", 2, lambda _: _JSON_VALUES, JSON, _json_values),
)  # fmt: skip
