"""Parsers of data sets, and of what training leaves: snapshots and the states of workers."""

import bz2
import json
import os
import random
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fuzzing.mutations import BYTES, JSON, TEXT, Mutation, mutated
from fuzzing.parser import Parser
from paceline.checkpoints import json_values, manifest
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.memory_file import read_state, write_state
from paceline.core.errors import InvalidInput
from paceline.training.data.images import load_images
from paceline.training.data.libsvm import load_libsvm
from paceline.training.data.text import load_tokens

_VALUES = {
    "step": 3,
    "rate": 0.5,
    "order": (1, 2),
    "best": float("inf"),
    "by": {1: "a"},
    "x": [None],
}


def _libsvm_seeds(folder: Path) -> list[bytes]:
    rows = [f"{1 if i % 2 else -1} 1:{i / 7:.4g} 3:0.5 {4 + i % 5}:1.25" for i in range(30)]
    more = [f"{i % 3} 2:1e-3 7:{i}  # a comment" for i in range(20)]
    return ["\n".join(rows).encode() + b"\n", "\n".join(more).encode()]


def _libsvm(data: bytes, folder: Path) -> object:
    path = folder / "data.libsvm"
    path.write_bytes(data)
    found = load_libsvm(str(path), None, 0)
    return found.train[0], found.num_classes


def _packed_seeds(folder: Path) -> list[bytes]:
    return [bz2.compress(one) for one in _libsvm_seeds(folder)]


def _of_the_text(rule: Mutation) -> Mutation:
    def packed(random: random.Random, data: bytes) -> bytes:
        try:
            text = bz2.decompress(data)
        except (OSError, ValueError):
            return data
        return bz2.compress(rule(random, text[: 2**16]))

    return packed


def _bomb(random: random.Random, data: bytes) -> bytes:
    """Pack what becomes far larger than it is."""
    piece = random.choice((b"\n", b" ", b"1 1:1\n", b"9", b"1 1:1 "))
    return bz2.compress(piece * (random.choice((10**5, 10**6, 10**7)) // len(piece)))


def _packed(data: bytes, folder: Path) -> object:
    path = folder / "data.bz2"
    path.write_bytes(data)
    return load_libsvm(str(path), None, 0).num_classes


def _image_seeds(folder: Path) -> list[bytes]:
    pixels = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    found = []
    for kind, mode in (
        ("PNG", "RGB"),
        ("JPEG", "L"),
        ("BMP", "RGB"),
        ("WEBP", "RGB"),
        ("PNG", "P"),
    ):
        file = BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, kind)
        found.append(file.getvalue())
    return found


def _huge(random: random.Random, data: bytes) -> bytes:
    """Say another size in the header of a PNG, with a checksum that fits."""
    if data[:4] != b"\x89PNG":
        return data
    sizes = [random.choice((0, 1, 2**13, 2**15, 2**31 - 1)).to_bytes(4, "big") for _ in range(2)]
    head = b"IHDR" + b"".join(sizes) + data[24:29]
    return data[:12] + head + zlib.crc32(head).to_bytes(4, "big") + data[33:]


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


def _tokens(data: bytes, folder: Path) -> object:
    path = folder / "tokens.npy"
    path.write_bytes(data)
    return load_tokens(str(path), (16,), 0).num_classes


def _checkpoint_seeds(folder: Path) -> list[bytes]:
    """Return the files of a checkpoint, each behind its name."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}
    path = CheckpointFolder(folder / "checkpoints").write(
        7, {"model.safetensors": tensors, "progress.json": _VALUES}
    )
    return [one.name.encode() + b"\n" + one.read_bytes() for one in sorted(path.iterdir())]


def _behind_the_name(random: random.Random, data: bytes) -> bytes:
    name, newline, rest = data.partition(b"\n")
    rules = BYTES if name.endswith(b".safetensors") else JSON
    return name + newline + mutated(random, rest, rules)


def _checkpoint(data: bytes, folder: Path) -> object:
    """Read a checkpoint of which one file was changed, whose checksums fit nevertheless."""
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
    assert loaded is not None
    return loaded.tensors("model"), loaded.json("progress")


_WHOLE: dict[str, bytes] = {}


def _state_seeds(folder: Path) -> list[bytes]:
    fd = os.memfd_create("state")
    write_state(fd, {"a": torch.arange(6.0), "b": torch.ones(3, 2)}, [{"step": 1}])
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return [data]


def _other_header(random: random.Random, data: bytes) -> bytes:
    """Change the header's JSON, or its length."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.3:
        length = random.choice((0, 7, min(length + 1, 9999), 2**31, 2**63, 2**64 - 1))
        return length.to_bytes(8, "little") + data[8:]
    header = mutated(random, data[8 : 8 + min(length, len(data))], JSON)
    return len(header).to_bytes(8, "little") + header + bytes(random.choice((0, 64, 4096)))


def _state(data: bytes, folder: Path) -> object:
    fd = os.memfd_create("state")
    try:
        os.write(fd, data)
        tensors, values = read_state(fd)
        return {name: one.numel() for name, one in tensors.items()}, values
    finally:
        os.close(fd)


def _values_seeds(folder: Path) -> list[bytes]:
    return [json_values.dumps("values", _VALUES), json.dumps({"a": [1, 2]}).encode()]


def _json_values(data: bytes, folder: Path) -> object:
    try:
        return (json_values.loads(data),)
    except ValueError as error:  # which its callers turn into InvalidInput
        raise InvalidInput.of(str(error)) from None


PARSERS = (
    Parser("libsvm", False, 3, _libsvm_seeds, TEXT, _libsvm),
    Parser(
        "packed libsvm", False, 1, _packed_seeds,
        (*BYTES, _bomb, *map(_of_the_text, TEXT)), _packed,
    ),
    Parser("images", False, 2, _image_seeds, (*BYTES, _huge), _image),
    Parser("tokens", False, 1, _token_seeds, TEXT, _tokens),
    Parser("checkpoint", False, 3, _checkpoint_seeds, (_behind_the_name,), _checkpoint),
    Parser("checkpoint values", False, 2, _values_seeds, JSON, _json_values),
    Parser("worker state", False, 2, _state_seeds, (*BYTES, *[_other_header] * 5), _state),
)  # fmt: skip
