"""The paper's tables, cell by cell."""

from collections.abc import Iterator

from paceline.papers.cells import Basis, Cell, Paper, Table
from paceline.papers.dgx1 import memory, printed
from paceline.papers.dgx1.networks import counts
from paceline.papers.dgx1.printed import Method
from paceline.papers.dgx1.steps import step_s

_BATCH = 16
# Table IV's LeNet is not one of 60,000 weights (see the README).
_IN_MEMORY = tuple(name for name in printed.MEMORY if name != "LeNet")


def paper() -> Paper:
    """Return what can be reproduced."""
    return Paper(
        "dgx1",
        "Mojumder et al., Profiling DNN Workloads on a Volta-based DGX-1 System, IISWC 2018",
        (
            Table("Table I: layers and weights", tuple(_networks())),
            Table("Section V-A: LeNet, batches of 16, speed-up over one GPU", tuple(_lenet())),
            Table("Section V-A: batch size, and two GPUs; P2P", tuple(_other_speedups())),
            Table("Section V-A: the faster method, batches of 16", tuple(_faster())),
            Table("Section V-A: P2P's time over NCCL's, batches of 16", tuple(_gains())),
            Table("Table II: NCCL's time over P2P's on one GPU", tuple(_overheads())),
            Table("Table IV: memory in training on four GPUs, GB", tuple(_memory())),
            Table("Table IV: GPU 0's memory over that with batches of 16", tuple(_growth())),
            Table("Section V-D: largest batch that fits", tuple(_largest())),
        ),
        (
            ("seconds to start a GPU's step, P2P", "section V-A: LeNet, P2P, 4 GPUs"),
            ("seconds to start a GPU's step, NCCL", "section V-A: LeNet, NCCL, 4 GPUs"),
            ("efficiency of copies over NVLink", "section V-A: GoogLeNet, 4 GPUs"),
            ("slow-down by NCCL", "table II: GoogLeNet, batch 16"),
            *(
                (f"bytes an image, {name}", f"table IV: {name}, GPUx, batch 16")
                for name in _IN_MEMORY
            ),
            ("which ResNet", "table IV: ResNet, GPU0, batch 16"),
        ),
    )


def _networks() -> Iterator[Cell]:
    """Yield the cells in which the paper's networks are the published ones.

    The README lists the others.
    """
    for name, row in printed.COUNTS.items():
        ours = counts(name)
        ours = ours._replace(weights=round(ours.weights, -printed.WEIGHTS_DIGIT[name]))
        for field, value, own in zip(row._fields, row, ours, strict=True):
            if value == own:
                yield Cell(f"{name}, {field.replace('_', ' ')}", value, own, Basis.EXACT)


def _speedup(network: str, method: Method, gpus: int, batch_size: int = _BATCH) -> float:
    alone_s = step_s(network, batch_size, method, 1)
    return gpus * alone_s / step_s(network, batch_size, method, gpus)


def _lenet() -> Iterator[Cell]:
    for method, speedups in printed.LENET_SPEEDUPS.items():
        for gpus, value in speedups.items():
            calibrated = gpus == 4
            basis = Basis.CALIBRATED if calibrated else Basis.PREDICTED
            yield Cell(f"{method}, {gpus} GPUs", value, _speedup("LeNet", method, gpus), basis)


def _other_speedups() -> Iterator[Cell]:
    first_s = step_s("LeNet", _BATCH, "P2P", 4)
    for size, value in printed.LENET_BATCHES.items():
        ours = size / _BATCH * first_s / step_s("LeNet", size, "P2P", 4)
        name = f"LeNet, 4 GPUs, batch {size} over {_BATCH}"
        yield Cell(name, value, ours, Basis.PREDICTED)
    best = max(
        _speedup(name, "P2P", 2, size) for name in printed.FASTER for size in printed.BATCH_SIZES
    )
    yield Cell(
        "all networks and batches, 2 GPUs over 1, at best",
        printed.BEST_ON_TWO,
        best,
        Basis.PREDICTED,
    )


def _gain(network: str, gpus: int) -> float:
    return step_s(network, _BATCH, "P2P", gpus) / step_s(network, _BATCH, "NCCL", gpus)


def _basis(network: str, gpus: int) -> Basis:
    calibrated = (network, gpus) == ("GoogLeNet", 4)
    return Basis.CALIBRATED if calibrated else Basis.PREDICTED


def _faster() -> Iterator[Cell]:
    for network, method in printed.FASTER.items():
        for gpus in (4, 8):
            ours = "NCCL" if _gain(network, gpus) > 1 else "P2P"
            yield Cell(f"{network}, {gpus} GPUs", method, ours, _basis(network, gpus))


def _gains() -> Iterator[Cell]:
    for network, gains in printed.NCCL_GAINS.items():
        for gpus, value in gains.items():
            ours = _gain(network, gpus)
            yield Cell(f"{network}, {gpus} GPUs", value, ours, _basis(network, gpus))


def _overheads() -> Iterator[Cell]:
    for network, overheads in printed.OVERHEADS.items():
        for size, percent in overheads.items():
            calibrated = (network, size) == ("GoogLeNet", _BATCH)
            basis = Basis.CALIBRATED if calibrated else Basis.PREDICTED
            ours = step_s(network, size, "NCCL", 1) / step_s(network, size, "P2P", 1)
            yield Cell(f"{network}, batch {size}", 1 + percent / 100, ours, basis)


def _memory() -> Iterator[Cell]:
    for network in _IN_MEMORY:
        for size, row in printed.MEMORY[network].items():
            calibrated = size == memory.CALIBRATED_ON
            basis = Basis.CALIBRATED if calibrated else Basis.PREDICTED
            cell = f"{network}, batch {size}"
            yield Cell(f"{cell}, GPUx", row.others, memory.others_gb(network, size), basis)
            basis = Basis.CALIBRATED if calibrated and network == "ResNet" else Basis.PREDICTED
            yield Cell(f"{cell}, GPU0", row.gpu0, memory.gpu0_gb(network, size), basis)


def _growth() -> Iterator[Cell]:
    for network in _IN_MEMORY:
        for size, row in printed.MEMORY[network].items():
            if row.growth is not None:
                ours = memory.growth(network, size)
                value = 1 + row.growth / 100
                yield Cell(f"{network}, batch {size}", value, ours, Basis.PREDICTED)


def _largest() -> Iterator[Cell]:
    for network, size in printed.LARGEST_BATCH.items():
        ours = memory.largest_batch(network)
        yield Cell(f"{network}", size, ours, Basis.PREDICTED)
