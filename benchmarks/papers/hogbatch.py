"""Plan Ma, Rusu et al. 2020, "Adaptive Stochastic Gradient Descent ... on CPU+GPU": section VII.

The paper has no table of results. The cells are the numbers that its text gives for its figures;
the workloads are the networks of table II.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from pydantic import TypeAdapter

from paceline.core.cost import Roofline, compute_lane
from paceline.core.losses import WITHIN_A_HOST
from paceline.core.machine import DeviceKind, Machine
from paceline.core.plan import COMPUTE, Kind, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.timeline import Origin, Span, Timeline
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.hogbatch.config import Hogbatch, PolicyName, WorkerSpec
from paceline.strategies.hogbatch.plan import MODEL, EventLoop, PricedWorkers, plan
from papers.paper_tables import Paper, paper_of, read_printed

_NBYTES = 8  # float64: 64,700 x 300 x 8 is w8a's 155 MB, and 72,309 x 20,958 x 8 real-sim's 12.1 GB
_FLOPS = 2  # a float64 operation takes as long as two float32 operations, on CPU and GPU
_SIGMOID = 4  # operations: 1 / (1 + exp(-x))
_SIGMOID_BACKWARD = 3  # g y (1 - y)
THREADS = 56  # of the CPU worker, section VII-A
CPU_THREADS = 64  # of the machine; figure 7 shows the busy share of these
GPU_DEPTH = 1  # in algorithm 2, a worker requests a batch after its update of the model
HORIZON_S = 10.0  # shorter than Hogwild's epoch on every data set, as in the paper
# Threads of a batch wait for the slowest thread, like workers that exchange in each step.
WAITING = WITHIN_A_HOST.slowdown(0.0, THREADS)
ALMOST_ALL = 0.9  # our reading of "almost exclusive"

_UPDATE_KINDS = frozenset({Kind.H2D, Kind.FORWARD, Kind.STEP, Kind.REDUCE})


@dataclass(frozen=True)
class DataSet:
    """A row of table II: number of examples, layer widths, and batch thresholds (lower, upper).

    `cpu_batch`: samples per CPU thread. `gpu_batch`: samples of the GPU.
    """

    name: str
    num_examples: int
    widths: tuple[int, ...]
    cpu_batch: tuple[int, int]
    gpu_batch: tuple[int, int]


DATA_SETS = TypeAdapter(tuple[DataSet, ...]).validate_python(read_printed("hogbatch")["data_sets"])


def workload(data: DataSet, batch_size: int) -> Workload:
    """Describe the network's training step: sigmoid layers without biases, in float64.

    A sample has its features and one value per class.
    """
    layers = []
    for number, (inputs, outputs) in enumerate(pairwise(data.widths), 1):
        x, y, weights = batch_size * inputs, batch_size * outputs, inputs * outputs
        product = Cost(2 * _FLOPS * batch_size * weights, _NBYTES * (x + y + weights), 1)
        sigmoid = Cost(_SIGMOID * _FLOPS * y, 2 * _NBYTES * y, 1)
        backward = Cost(_SIGMOID_BACKWARD * _FLOPS * y, 3 * _NBYTES * y, 1) + product
        if number > 1:  # the first layer's input needs no gradient
            backward += product
        parameter = Parameter("weight", (inputs, outputs), _NBYTES)
        forward = product + sigmoid
        layers.append(Layer(f"fc{number}", (parameter,), _NBYTES * y, forward, backward))
    order = tuple(reversed(range(len(layers))))
    nbytes = _NBYTES * batch_size * (data.widths[0] + data.widths[-1])
    return Workload(data.name, batch_size, tuple(layers), order, nbytes)


def paper() -> Paper:
    """Return the paper's epochs, updates and utilisation with the values of our plans."""
    epochs_s = {data.name: hogwild_epoch_s(data) for data in DATA_SETS}
    on_gpu_s = [gpu_batch(one).seconds * one.num_examples / one.gpu_batch[1] for one in DATA_SETS]
    ratios = [epochs_s[one.name] / own_s for one, own_s in zip(DATA_SETS, on_gpu_s, strict=True)]
    covtype = DATA_SETS[0]
    together, adaptive = run(covtype, "cpu_gpu"), run(covtype, "adaptive")
    cpu = utilisation(together[1])["cpu0"] * THREADS / CPU_THREADS / WAITING
    beside = kernels(*together)
    alone = gpu_batch(covtype).utilisation

    def cpu_updates(policy: PolicyName, name: str) -> str:
        (data,) = (one for one in DATA_SETS if one.name == name)
        return "almost all" if cpu_share(data, policy) >= ALMOST_ALL else "not almost all"

    return paper_of(
        "hogbatch",
        {
            "section 7-b": {
                "lowest of the four data sets": min(ratios),
                "highest of the four data sets": max(ratios),
                "closest to an epoch in its time": min(epochs_s, key=lambda name: epochs_s[name]),
            },
            "figure 8": cpu_updates,
            "figure 7": {
                "CPU in CPU+GPU": 100 * cpu,
                "GPU at the upper threshold": 100 * alone,
                "GPU alone": "above 80" if alone > 0.8 else "below 80",
                "GPU in CPU+GPU": "above 80" if beside > 0.8 else "below 80",
                "GPU in Adaptive, beside CPU+GPU": (
                    "lower" if kernels(*adaptive) < beside else "higher"
                ),
            },
        },
    )


def devices(*names: str) -> Machine:
    """Return the paper's machine with only these devices, in this order.

    The CPU is slowed by `WAITING`, because its threads wait for each other.
    """
    machine = find_machine("p3-16xlarge")
    known = {device.name: device for device in machine.devices}
    cores = known["cpu0"]
    slower = {
        "flops_per_s": cores.flops_per_s / WAITING,
        "memory_bandwidth_bytes_per_s": cores.memory_bandwidth_bytes_per_s / WAITING,
    }
    known["cpu0"] = cores.model_copy(update=slower)
    return machine.model_copy(update={"devices": tuple(known[name] for name in names)})


def hogwild_epoch_s(data: DataSet) -> float:
    """Return the seconds of an epoch of Hogwild on the CPU."""
    work, machine = workload(data, THREADS), devices("cpu0")
    config = Hogbatch(workers=1, policy="hogwild", threads=THREADS)
    batch_s = period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), 2)
    return batch_s * data.num_examples / THREADS


class GpuBatch(NamedTuple):
    """A batch of mini-batch SGD on the GPU: seconds, and the time share with a running kernel."""

    seconds: float
    utilisation: float


def gpu_batch(data: DataSet) -> GpuBatch:
    """Return a batch of the upper threshold's size, on a GPU that keeps the model."""
    machine, size = devices("gpu0"), data.gpu_batch[1]
    config = Hogbatch(workers=1, policy="hogbatch", gpu_depth=GPU_DEPTH)
    batch = PricedWorkers(workload(data, size), machine, config).batch(0, size)
    rate = Roofline.of(machine).rates[compute_lane("gpu0")]
    own_s = zip(batch.tasks, batch.seconds, strict=True)
    seconds = sum(task_s for task, task_s in own_s if task.kind in COMPUTE or task.part == "batch")
    kernels_s = sum(rate.work_s(task.cost) for task in batch.tasks if task.kind in COMPUTE)
    return GpuBatch(seconds, kernels_s / seconds)


def plan_until(work: Workload, machine: Machine, config: Hogbatch, horizon_s: float) -> Plan:
    """Return the tasks of all batches that are assigned before the horizon."""
    return Plan(EventLoop(PricedWorkers(work, machine, config)).tasks(horizon_s=horizon_s))


def simulate_until(tasks: Plan, machine: Machine, horizon_s: float) -> Timeline:
    """Return the timeline of the tasks that end by the horizon."""
    spans = simulate(tasks, Roofline.of(machine)).spans
    return Timeline((span for span in spans if span.end_s <= horizon_s), Origin.PREDICTED)


@cache
def run(data: DataSet, policy: PolicyName) -> tuple[Plan, Timeline]:
    """Return the plan and the timeline of CPU and GPU within the horizon."""
    machine, work = devices("cpu0", "gpu0"), workload(data, data.gpu_batch[1])
    tasks = plan_until(work, machine, configuration(data, policy), HORIZON_S)
    return tasks, simulate_until(tasks, machine, HORIZON_S)


def kernels(tasks: Plan, timeline: Timeline) -> float:
    """Return the GPU's utilisation, as its driver counts it: the time share with a running kernel.

    Kernel launches, waits and copies do not count.
    """
    lane = compute_lane("gpu0")
    rate = Roofline.of(devices("gpu0")).rates[lane]
    spans = timeline.tracks[lane]
    return sum(rate.work_s(tasks[span.name].cost) for span in spans) / timeline.makespan_s


def configuration(data: DataSet, policy: PolicyName) -> Hogbatch:
    """Return the paper's configuration of CPU and GPU for a data set (table II)."""
    batches = {"cpu_batch": data.cpu_batch, "gpu_batch": data.gpu_batch}
    return Hogbatch(workers=2, policy=policy, threads=THREADS, gpu_depth=GPU_DEPTH, **batches)


def cpu_share(data: DataSet, policy: PolicyName) -> float:
    """Return the CPU's share of all updates (figure 8)."""
    workers = {"cpu0": WorkerSpec(DeviceKind.CPU, THREADS), "gpu0": WorkerSpec(DeviceKind.GPU)}
    config, made = configuration(data, policy), updates(run(data, policy)[1])
    counted = {
        name: config.weighted(spec, len(made[name]) * spec.threads)
        for name, spec in workers.items()
    }
    return counted["cpu0"] / sum(counted.values())


class Update(NamedTuple):
    """A batch, with fields of a run's `BatchRecord`; it starts when its worker reads the model."""

    started_s: float
    ended_s: float
    num_samples: int


def updates(timeline: Timeline) -> dict[str, list[Update]]:
    """Return each device's updates in a planned timeline, in the format of a run's log.

    Each STEP span of a device is an update. An update of a GPU that shares the model reaches the
    model at the end of the following REDUCE. Updates in transit at the end do not count. Batches of
    a GPU overlap, so spans are grouped by batch number.
    """
    spans: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.kind in _UPDATE_KINDS:
            spans[span.on[0].owner][span.step].append(span)
    found = {}
    for device, batches in spans.items():
        pushes = any(span.part == MODEL for own in batches.values() for span in own)
        made = (_update_of(own, pushes) for own in batches.values())
        known = (one for one in made if one is not None)
        found[device] = sorted(known, key=lambda one: one.ended_s)
    return found


def _update_of(spans: Sequence[Span], pushes: bool) -> Update | None:
    """Return the update of a batch with these spans; None if it has not reached the model."""
    last = Kind.REDUCE if pushes else Kind.STEP
    ends = [span.end_s for span in spans if span.kind is last]
    if not ends:
        return None
    step = next(span for span in spans if span.kind is Kind.STEP)
    reading = Kind.H2D if pushes else Kind.FORWARD
    reads = (span.start_s for span in spans if span.kind is reading and span.part != "batch")
    return Update(min(reads, default=step.start_s), ends[0], step.num_samples)


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Return the share of the makespan in which each device computes (figure 7)."""
    held = timeline.utilisation
    return {device: held.get(compute_lane(device), 0.0) for device in updates(timeline)}
