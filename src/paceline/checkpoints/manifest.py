"""Write, read and verify a checkpoint's manifest, a list of files with sizes and checksums.

    "files": {"model.safetensors": {"nbytes": 119552, "crc32": "9d3c2a10"}},
    "crc32": "5be1f00c"

The last `crc32` is the checksum of all lines above it. All later formats must keep this checksum,
so that `read` can distinguish a manifest of a newer format from a damaged manifest. CRC-32 detects
disk errors and truncated files, but not forgery; it is twice as fast as SHA-256.
"""

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline.core.errors import InvalidInput, PacelineError
from paceline.core.reading import first_fault, read_json
from paceline.links.files import limits, read_file

MANIFEST = "manifest.json"
FORMAT = 1
_CONFIG = ConfigDict(extra="forbid")
_PIECE_NBYTES = 1 << 20
# A name has no separator and no leading dot, so a manifest cannot name files outside its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json)")


class Damaged(PacelineError):
    """A checkpoint is incomplete or changed; the message names the file and the fault."""


def check_file_name(name: str) -> str:
    """Return `name`; raise ValueError if it is not a valid file name in a checkpoint."""
    if _FILE_NAME.fullmatch(name) is None or name == MANIFEST:
        raise ValueError(f"{name!r} is not a valid file name: use NAME.safetensors or NAME.json")
    return name


@dataclass(frozen=True, config=_CONFIG)
class FileEntry:
    """A file's size in bytes, and its CRC-32 checksum as eight hexadecimal digits."""

    nbytes: Annotated[int, Field(ge=0, lt=2**63)]
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """The step of a checkpoint, and its files by name."""

    step: Annotated[int, Field(ge=0, lt=2**63)]
    files: dict[Annotated[str, AfterValidator(check_file_name)], FileEntry]
    format_version: Annotated[int, Field(ge=FORMAT, strict=True)]


def write_pieces(file: BinaryIO, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Write pieces to a file; return the file's size and checksum."""
    nbytes = checksum = 0
    for piece in pieces:
        file.write(piece)
        checksum = zlib.crc32(piece, checksum)
        nbytes += len(piece)
    return FileEntry(nbytes, _digits(checksum))


def to_bytes(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON that ends with a checksum."""
    text = json.dumps({"format_version": manifest.format_version} | asdict(manifest), indent=1)
    head = text.removesuffix("\n}").encode() + b",\n"
    return head + _last_line(head)


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises Damaged if the manifest is missing or changed. Raises InvalidInput if the manifest's
    format is newer than the format of this Paceline version.
    """
    try:
        text = read_file(folder / MANIFEST, limits.MANIFEST)
        head = text[: len(text) - len(_last_line(b""))]
        if head + _last_line(head) != text:
            raise Damaged(f"{MANIFEST} is cut off or changed: wrong checksum")
        fields = read_json(text, MANIFEST)
    except InvalidInput as error:
        raise Damaged(f"{MANIFEST} {error.problem}") from None
    del fields["crc32"]  # checked above; not a field of `Manifest`
    version = fields.get("format_version")
    if type(version) is int and version > FORMAT:
        problem = f"is a checkpoint of format {version}; this Paceline reads format {FORMAT}"
        hint = "use the Paceline version that wrote it, or a later version"
        raise InvalidInput(str(folder), problem, hint=hint)
    try:
        return TypeAdapter(Manifest).validate_python(fields)
    except ValidationError as error:
        raise Damaged(f"{MANIFEST} is not valid: {first_fault(error)}") from None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise Damaged if a file of the checkpoint is missing or changed."""
    for name, entry in manifest.files.items():
        try:
            _check_file(folder / name, entry)
        except OSError as error:
            raise Damaged(f"{name} is not readable: {error.strerror}") from None


def _last_line(head: bytes) -> bytes:
    return b' "crc32": "%s"\n}\n' % _digits(zlib.crc32(head)).encode()


def _digits(checksum: int) -> str:
    return f"{checksum:08x}"


def _check_file(path: Path, entry: FileEntry) -> None:
    nbytes = path.stat().st_size
    if not path.is_file():  # do not open a pipe, which would wait for a writer
        raise Damaged(f"{path.name} is not a file")
    if nbytes != entry.nbytes:
        raise Damaged(f"{path.name} has {nbytes:,} bytes instead of {entry.nbytes:,}")
    checksum, piece = 0, bytearray(_PIECE_NBYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            checksum = zlib.crc32(memoryview(piece)[:count], checksum)
    if _digits(checksum) != entry.crc32:
        raise Damaged(f"{path.name} was changed: checksum {_digits(checksum)}, not {entry.crc32}")
