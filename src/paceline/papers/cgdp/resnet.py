"""ResNet-152 against the chunk size: figure 2, section 5.3 and Algorithm 1."""

from functools import cache

from paceline.papers.cells import Basis, Cell, Table
from paceline.papers.cgdp.networks import BATCH_SIZES, network
from paceline.papers.cgdp.printed import HOST, RESNET_SPEEDUP, TREE
from paceline.papers.cgdp.runs import Run, times_of_resnet
from paceline.tune.chunk import RuntimeSearch

_WORKERS = 4
_BATCH_SIZE = BATCH_SIZES["resnet152"]  # of section 5.3
_FIGURE_2 = 16  # images a GPU
# Of figure 2's 1 to 100, what Algorithm 1 may try in steps of 5 or 10.
_SIZES = (*range(1, 10), *range(10, 101, 5))
# Section 5.3: Algorithm 1 found these, with step 10 and range 5, and with 5 and 10. Training with
# 3, 6, 9 and 20 was equally fast, and 1.07 times faster than the tree.
_FOUND = {(10, 5): 9, (5, 10): 20}
_EQUALLY_FAST = (3, 6, 9, 20)


@cache
def step_ms(strategy: str, chunk: int = 1, batch_size: int = _BATCH_SIZE) -> float:
    """Return the milliseconds of a step on four GPUs."""
    known, times = network("resnet152", batch_size), times_of_resnet(batch_size)
    return Run(known, times, strategy, _WORKERS, chunk).step_ms


def table() -> Table:
    """Return what the paper says of ResNet-152, with ours beside it."""
    title = "Figure 2 and section 5.3: ResNet-152 on four GPUs"
    return Table(title, (*_figure_2(), *_speedups(), *_algorithm_1()))


def _figure_2() -> list[Cell]:
    def of(chunk: int) -> float:
        return step_ms(HOST, chunk, _FIGURE_2)

    typical = step_ms(TREE, batch_size=_FIGURE_2)
    best, largest = min(map(of, _SIZES)), _SIZES[-1]
    said = [("chunks of 1, against BVLC/Caffe", "slower", of(1), typical)]
    said += [
        (f"chunks of {after}, against {before}", "faster", of(after), of(before))
        for before, after in ((1, 2), (2, 4), (4, 6), (6, 8))
    ]
    said.append((f"chunks of {largest}, against the best", "slower", of(largest), best))
    return [
        Cell(name, printed, "faster" if ours < other else "slower", Basis.PREDICTED)
        for name, printed, ours, other in said
    ]


def _speedups() -> list[Cell]:
    typical = step_ms(TREE)
    best = min(step_ms(HOST, chunk) for chunk in _SIZES)
    cells = [
        Cell(
            f"speed-up over BVLC/Caffe, chunks of {chunk}",
            RESNET_SPEEDUP,
            typical / step_ms(HOST, chunk),
            Basis.PREDICTED,
        )
        for chunk in _EQUALLY_FAST
    ]
    name = "speed-up over BVLC/Caffe, best chunk"
    return [*cells, Cell(name, RESNET_SPEEDUP, typical / best, Basis.PREDICTED)]


def _algorithm_1() -> list[Cell]:
    return [
        Cell(
            f"chunk found by Algorithm 1, step {step}, range {reach}",
            str(printed),
            str(found(step, reach)),
            Basis.PREDICTED,
        )
        for (step, reach), printed in _FOUND.items()
    ]


def found(step: int, reach: int) -> int:
    """Return the chunk that Algorithm 1 would find."""
    num_layers = len(network("resnet152", _BATCH_SIZE).workload.layers)
    search = RuntimeSearch(num_layers, step, reach, interval=1)
    while not search.done:
        search.record(step_ms(HOST, search.chunk))
    return search.chunk
