"""Define the fuzzed parsers of files: machines, runs, data sets and checkpoints."""

import shutil
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

from command_line import steps, write_run
from findings import run_result
from fuzzing.changes import BYTES, JSON, NODES, TEXT, TOML, Change, behind_one_byte
from fuzzing.parser import Parser, on_file
from paceline.checkpoints import manifest
from paceline.checkpoints.folder import CheckpointFolder
from paceline.core import outcome as parts
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Origin
from paceline.record.trace import read_trace, write_trace
from paceline.records.machine_file import machine_text, read_machine
from paceline.records.result import PlanResult, RankingRows, RunResult, read_result
from paceline.records.scale import ScaleResult, ScaleSettings
from paceline.report import write_report
from paceline.training.data.images import load_images
from paceline.training.data.libsvm import load_libsvm
from paceline.training.data.text import load_tokens
from plan_rows import plan_row
from profiles import LARGEST, profile_result, write_profile
from scale_cells import cell, failed, study

_MACHINES = Path(__file__).parents[3] / "machines"
_VALUES = {"step": 3, "rate": 0.5, "order": (1, 2), "best": float("inf"), "by": {1: "a"}, "x": []}


def _machine_seeds(folder: Path) -> list[bytes]:
    files = sorted(_MACHINES.glob("**/*.toml"))
    texts = [file.read_bytes() for file in files if file.stat().st_size < 20_000]
    return [*texts, machine_text(read_machine(files[0])).encode()]


def _machine(path: Path) -> object:
    found = read_machine(path)
    return machine_text(found), found.num_devices


def _asynchronous() -> RunResult:
    names = ("cpu0", "cpu1")
    late = {name: {0: 10, 1: 30, 40: 10} for name in names}
    speeds = ((0.1, 64), (0.2, 128))
    return run_result(
        settings=TrainSettings(model="mlp", strategy="hogbatch", workers="cpu:1,cpu:2@slow=16"),
        config={"policy": "adaptive"},
        plans=(plan_row(workers=1, notes=("a note",)),),
        trials=(parts.ChunkTrial(3, 0.01, 0.011), parts.ChunkTrial(5, 0.012, 0.013)),
        epochs=tuple(parts.Epoch(i, 2.0 / (i + 1), 1.9, 0.5, 3.0) for i in range(3)),
        evaluations=(parts.Evaluation(10, 1.5, 0.4), parts.Evaluation(20, 1.2, None)),
        faults=("s0/step@worker0 is missing",),
        traffic=(parts.Traffic("gradients", 1e6, 1e6), parts.Traffic("labels", 2e6, 2e6, False)),
        sent_share=parts.SentShare("threshold:0.1", 0.1, 0.11, None),
        head=parts.SplitHead(("out",), 4000, (2000, 2000)),
        updates=parts.Updates(100, dict.fromkeys(names, 50), late, 1.5, ((0.5, 1), (1.0, 3))),
        workers=tuple(
            parts.UnevenWorker(name, "cpu:1", 500.0, 3000, 0.5, 0.5, speeds) for name in names
        ),
        utilisation=dict.fromkeys(names, 0.9),
        predicted_utilisation=dict.fromkeys(names, 0.8),
    )


def _plan() -> PlanResult:
    plans = tuple(plan_row(workers=count, samples_per_s=count) for count in (1, 2, 4))
    rows = RankingRows(plans=plans, refused=(), workers_worth=2, alone_samples_per_s=1.0)
    about = {"id": "plan", "model": "lenet5", "machine": "two", "batch_size": 64}
    return PlanResult(**about, facts={"paceline": "0"}, ranking=rows)


def _scale() -> ScaleResult:
    cells = (*study({"allreduce": 1.0, "tree": 2.0}, (1, 2, 4)), cell(batch=32), failed())
    one = parts.Finding(code="exchange", metric="exposed", value=1, threshold=0.1, message="Wait.")
    about = {"id": "scale", "paceline": "0", "machine": {}}
    settings = ScaleSettings(model="lenet5", workers=(1, 2, 4), batch_size=(16, 32))
    return ScaleResult(**about, settings=settings, cells=cells, findings=(one,))


def _results(folder: Path) -> list[bytes]:
    write_run(folder / "run", 0.01, 0.011)
    write_profile(folder / "profile", profile_result(largest=LARGEST))
    written = [(folder / name / "result.json").read_bytes() for name in ("run", "profile")]
    return written + [
        one.model_dump_json().encode() for one in (_asynchronous(), _plan(), _scale())
    ]


def _traces(folder: Path) -> list[bytes]:
    path = folder / "trace.json"
    write_trace(path, [steps(0.01, origin) for origin in Origin])
    return [path.read_bytes()]


def _report(data: bytes, folder: Path) -> object:
    """Write the report of a run with a changed result or trace; the other file is valid."""
    is_trace = b'"traceEvents"' in data or b'"displayTimeUnit"' in data
    for name in ("result.json", "trace.json"):
        shutil.copy(folder.with_name("run") / name, folder)
    (folder / ("trace.json" if is_trace else "result.json")).write_bytes(data)
    page = write_report(folder).read_text(encoding="utf-8")
    if "<script>alert" in page:
        raise AssertionError("text of the file became markup in the page")
    return page


def _libsvm_seeds(folder: Path) -> list[bytes]:
    rows = [f"{1 if i % 2 else -1} 1:{i / 7:.4g} 3:0.5 {4 + i % 5}:1.25" for i in range(30)]
    more = [f"{i % 3} 2:1e-3 7:{i}  # a comment" for i in range(20)]
    return ["\n".join(rows).encode() + b"\n", "\n".join(more).encode()]


def _libsvm(path: Path) -> object:
    found = load_libsvm(str(path), None, 0)
    return found.train[0], found.num_classes


def _image_seeds(folder: Path) -> list[bytes]:
    pixels = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    found = []
    for kind, mode in (
        ("PNG", "RGB"),
        ("PNG", "P"),
        ("JPEG", "L"),
        ("BMP", "RGB"),
        ("WEBP", "RGB"),
    ):
        file = BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, kind)
        found.append(file.getvalue())
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(5):
            (folder / "images" / name / f"{number}.png").write_bytes(found[0])
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


def _image(data: bytes, folder: Path) -> object:
    images = folder.with_name("images")
    (images / "a" / "0.png").write_bytes(data)
    found = load_images(str(images), (3, 8, 8), 0)
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
    """Return the files of a checkpoint, each behind its number."""
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}
    named = {f"model/{name}": one for name, one in tensors.items()}
    path = CheckpointFolder(folder / "checkpoints").write(7, named, {"progress": _VALUES})
    return [bytes([i]) + one.read_bytes() for i, one in enumerate(sorted(path.iterdir()))]


def _checkpoint(data: bytes, folder: Path) -> object:
    """Read a checkpoint with one changed file and, except in some manifests, valid checksums."""
    shutil.copytree(folder.with_name("checkpoints"), folder / "checkpoints", dirs_exist_ok=True)
    found = CheckpointFolder(folder / "checkpoints")
    files = sorted((found.path / "step-00000007").iterdir())
    changed, rest = files[data[0]], data[1:]
    path = changed.with_name(manifest.MANIFEST)
    changed.write_bytes(rest)
    if changed != path:
        files.remove(path)
        sums = {one: f"{zlib.crc32(one.read_bytes()):08x}" for one in files}
        entries = {one.name: manifest.FileEntry(one.stat().st_size, sums[one]) for one in files}
        path.write_bytes(manifest.to_bytes(manifest.Manifest(7, entries, manifest.FORMAT)))
    elif zlib.crc32(rest) % 2:
        head = rest[: rest.rfind(b' "crc32"')]
        path.write_bytes(head + b' "crc32": "%08x"\n}\n' % zlib.crc32(head))
    return found.latest().read()


_PIXELS = st.sampled_from((0, 1, 2**13, 2**15, 2**31 - 1))
_SIZES = st.builds(_huge, _PIXELS, _PIXELS)
PARSERS = (
    Parser("machine", 3, _machine_seeds, TOML, on_file("machine.toml", _machine)),
    Parser(
        "result", 3, _results, JSON, on_file("result.json", lambda one: read_result(one.parent))
    ),
    Parser("trace", 3, _traces, JSON, on_file("trace.json", read_trace)),
    Parser("report", 0.5, lambda one: [*_results(one), *_traces(one)], NODES, _report),
    Parser("libsvm", 3, _libsvm_seeds, TEXT, on_file("data.libsvm", _libsvm)),
    Parser("images", 2, _image_seeds, BYTES | _SIZES, _image),
    Parser(
        *("tokens", 1, _token_seeds, TEXT),
        on_file("tokens.npy", lambda path: load_tokens(str(path), (16,), 0).num_classes),
    ),
    Parser("checkpoint", 3, _checkpoint_seeds, JSON.map(behind_one_byte), _checkpoint),
)
