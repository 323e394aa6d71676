"""Le et al., "Involving CPUs into Multi-GPU Deep Learning" (ICPE 2018).

Strategies `tree` (BVLC/Caffe) and `host` (TRL/Caffe), simulated on machines/power8-p100.toml. What
is calibrated, and on which cells, stands in papers/cgdp/README.md.
"""

from paceline.core.plan import Kind, task_name
from paceline.papers.cells import Basis, Cell, Paper, Table
from paceline.papers.cgdp import resnet
from paceline.papers.cgdp.networks import network
from paceline.papers.cgdp.printed import (
    FRAMEWORK,
    HOST,
    LONG_RUN,
    NAMES,
    NUM_ITERATIONS,
    NUM_TESTS,
    SPEEDUPS,
    TABLE_2,
    TABLE_3,
    TABLE_5,
    TEST_S,
    TREE,
    WORKERS,
    Phases,
)
from paceline.papers.cgdp.runs import Run, machine, run, times_alone
from paceline.strategies.host import plan as host
from paceline.strategies.host.config import Host
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree

_MAX_WORKERS = 4
_CITATION = (
    "Le, Sekiyama, Negishi, Imai, Kawachiya: Involving CPUs into Multi-GPU Deep Learning, ICPE 2018"
)
# Each stands for one constant; all phases of the tree's row of table 3 but the broadcast as well.
_CALIBRATED_IN_TABLE_2 = {
    (TREE, "alexnet", 1),
    (TREE, "googlenet", 1),
    (TREE, "vgg16", 1),
    (TREE, "alexnet", 2),
    (HOST, "alexnet", 2),
}
CONSTANTS = (
    ("AlexNet's time on one GPU", "table 2, BVLC/Caffe, AlexNet, 1 GPU"),
    ("GoogLeNet-v1's time on one GPU", "table 2, BVLC/Caffe, GoogLeNet-v1, 1 GPU"),
    ("VGGNet-16's time on one GPU", "table 2, BVLC/Caffe, VGGNet-16, 1 GPU"),
    ("bandwidth between two GPUs", "table 2, BVLC/Caffe, AlexNet, 2 GPUs"),
    ("synchronising once", "table 2, TRL/Caffe, AlexNet, 2 GPUs"),
    ("forward's share of computing", "table 3, BVLC/Caffe, forward"),
    ("computing beside other GPUs", "table 3, BVLC/Caffe, backward, with forward and update-param"),
    ("updating one parameter", "table 3, BVLC/Caffe, update-param"),
    ("a GPU's memory bandwidth", "table 3, BVLC/Caffe, grad-acc, less the broadcast"),
    ("arithmetic of a P100, for ResNet-152", "table 3, BVLC/Caffe, forward and backward"),
    ("time of a call, for ResNet-152", "table 2, BVLC/Caffe, GoogLeNet-v1, 1 GPU"),
)


def paper() -> Paper:
    """Return the paper's tables beside what the plans take."""
    tables = (_table_2(), _speedups(), _table_3(), _table_5(), _long_runs(), _chunk_one())
    return Paper("cgdp", _CITATION, (*tables, resnet.table()), CONSTANTS)


def _table_2() -> Table:
    cells = []
    for (strategy, name), row in TABLE_2.items():
        for workers, printed in zip(WORKERS, row, strict=True):
            known = (strategy, name, workers) in _CALIBRATED_IN_TABLE_2
            gpus = f"{workers} GPU{'s' * (workers > 1)}"
            cells.append(
                Cell(
                    f"{FRAMEWORK[strategy]}, {NAMES[name]}, {gpus}",
                    printed,
                    run(name, strategy, workers).step_ms,
                    Basis.CALIBRATED if known else Basis.PREDICTED,
                )
            )
    return Table("Table 2: running time for one training iteration (ms)", tuple(cells))


def _speedups() -> Table:
    cells = tuple(
        Cell(NAMES[name], printed, _speedup(name), Basis.PREDICTED)
        for name, printed in SPEEDUPS.items()
    )
    return Table("Section 5.2.1: BVLC/Caffe's time over TRL/Caffe's on four GPUs", cells)


def _speedup(name: str) -> float:
    return run(name, TREE, _MAX_WORKERS).step_ms / run(name, HOST, _MAX_WORKERS).step_ms


def _table_3() -> Table:
    ours = {strategy: phases(run("alexnet", strategy, _MAX_WORKERS)) for strategy in TABLE_3}
    cells = []
    for strategy, field, label in (
        (TREE, "broadcast", "broadcast"),
        (TREE, "forward", "forward"),
        (TREE, "backward", "backward"),
        (TREE, "accumulate", "grad-acc"),
        (TREE, "update", "update-param"),
        (HOST, "forward", "forward"),
        (HOST, "backward", "backward"),
        (HOST, "broadcast", "broadcast remaining gradients from CPUs"),
        (HOST, "update", "update-param"),
    ):
        known = strategy == TREE and field != "broadcast"
        cells.append(
            Cell(
                f"{FRAMEWORK[strategy]}, {label}",
                getattr(TABLE_3[strategy], field),
                getattr(ours[strategy], field),
                Basis.CALIBRATED if known else Basis.PREDICTED,
            )
        )
    title = "Table 3: running time for phases in one iteration for AlexNet with four GPUs (ms)"
    return Table(title, tuple(cells))


def phases(one: Run) -> Phases:
    """Return the phases of a step as GPU 0 sees them, in milliseconds.

    What remains to be broadcast for the host's run begins when the last chunk is in its memory. The
    paper's tree broadcasts parameters after the update, ours as many bytes of means before it.
    """
    work = one.network.workload
    spans = {span.name: span for span in one.timeline(2).spans}

    def of(kind: Kind, part: str = "", step: int = 0) -> str:
        return task_name(step, kind, part, worker=0)

    last = work.in_backward_order[-1].name
    update, forward_end = spans[of(Kind.STEP)], spans[of(Kind.FORWARD, work.layers[-1].name)].end_s
    backward_end = spans[of(Kind.BACKWARD, last)].end_s
    if one.strategy == TREE:
        down = [span for span in spans.values() if span.part.startswith("down")]
        first_s = min(span.start_s for span in down if span.start_s < update.start_s)
        accumulate_s = first_s - backward_end
        broadcast_s = update.start_s - first_s
    else:
        accumulate_s = 0.0
        broadcast_s = update.start_s - spans[of(Kind.D2H, str(len(work.layers) - 1))].end_s
    forward_s = forward_end - spans[of(Kind.LOAD)].end_s
    seconds = (broadcast_s, forward_s, backward_end - forward_end, accumulate_s, update.duration_s)
    return Phases(*(1e3 * s for s in seconds))


def _table_5() -> Table:
    cells = tuple(
        Cell(NAMES[name], one - other, less_memory_mb(name), Basis.PREDICTED)
        for name, (one, other) in TABLE_5.items()
    )
    return Table("Table 5: memory in a GPU, BVLC/Caffe less TRL/Caffe (MB)", cells)


def less_memory_mb(name: str) -> float:
    """Return by how many megabytes the fullest GPU of the tree is fuller than that of the host."""
    work = network(name).workload
    devices = [device.name for device in machine().first_devices(_MAX_WORKERS)]
    of_tree = tree.memory(work, machine(), Tree(workers=_MAX_WORKERS))
    of_host = host.memory(work, machine(), Host(workers=_MAX_WORKERS))
    fullest = [max(needed[device] for device in devices) for needed in (of_tree, of_host)]
    return (fullest[0] - fullest[1]) / 1e6


def _long_runs() -> Table:
    cells = []
    for strategy, printed in LONG_RUN.items():
        step_s = run("alexnet", strategy, _MAX_WORKERS).step_ms / 1e3
        minutes = (NUM_ITERATIONS * step_s + NUM_TESTS * TEST_S) / 60
        cells.append(Cell(FRAMEWORK[strategy], printed, minutes, Basis.PREDICTED))
    title = "Figure 4a: AlexNet to 50 % accuracy, 21,000 iterations and 21 tests (minutes)"
    return Table(title, tuple(cells))


def _chunk_one() -> Table:
    """Return the gain of the best chunk where the paper found none better than 1."""
    cells = []
    for name in NAMES:
        sizes = range(1, len(network(name).workload.layers))
        times = [
            Run(network(name), times_alone(name), HOST, _MAX_WORKERS, c).step_ms for c in sizes
        ]
        cells.append(Cell(NAMES[name], 1.0, times[0] / min(times), Basis.PREDICTED))
    title = "Section 5.3: TRL/Caffe's time with chunks of one over that with the best chunk"
    return Table(title, tuple(cells))
