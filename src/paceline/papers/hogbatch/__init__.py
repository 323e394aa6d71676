"""Ma, Rusu et al. 2020, "Adaptive Stochastic Gradient Descent ... on CPU+GPU": section VII.

The paper has no table of results; these are the numbers that its text prints of its figures.
"""

from functools import cache

from paceline.core.cost import Roofline, compute_lane
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.machine_file import find_machine
from paceline.papers.cells import Basis, Cell, Paper, Table
from paceline.papers.hogbatch.networks import DATA_SETS, DataSet, workload
from paceline.strategies.hogbatch import statistics
from paceline.strategies.hogbatch.config import Hogbatch, PolicyName
from paceline.strategies.hogbatch.plan import plan, plan_until, updates_per_batch

THREADS = 56  # of the CPU worker, section VII-A
CPU_THREADS = 64  # of the machine, of which figure 7 shows the share
HORIZON_S = 10.0  # less than Hogwild needs for an epoch of any data set, as in the paper
ALMOST_ALL = 0.9  # what "almost exclusive" is taken to be


def paper() -> Paper:
    """Return what the text says of epochs, updates and utilisation, and what the plans say."""
    return Paper(
        "hogbatch",
        "Ma, Rusu, Wu, Sim: Adaptive Stochastic Gradient Descent for Deep Learning on "
        "Heterogeneous CPU+GPU Architectures, 2020",
        (_epochs(), _updates(), _utilisation()),
        (
            (
                "flops of the CPU worker, 0.2 Tflop/s in float32",
                "figure 8: the CPU's share of delicious's updates in Adaptive Hogbatch, one half",
            ),
            (
                "latency of a kernel on the GPU, 5 us",
                "section VII-A: the GPU's utilisation at the lower threshold, about 50 %",
            ),
        ),
    )


def devices(*names: str) -> Machine:
    """Return the paper's machine with these devices alone, in this order."""
    machine = find_machine("p3-16xlarge")
    known = {device.name: device for device in machine.devices}
    return machine.model_copy(update={"devices": tuple(known[name] for name in names)})


def epoch_s(data: DataSet, device: str) -> float:
    """Return the seconds of an epoch on one device: of Hogwild on cores, of mini-batch SGD else.

    The GPU's batches are as large as the data set allows.
    """
    on_cores = device == "cpu0"
    size = THREADS if on_cores else data.gpu_batch[1]
    work, machine = workload(data, size), devices(device)
    config = Hogbatch(workers=1, policy="hogwild" if on_cores else "hogbatch", threads=THREADS)
    batch_s = period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), 2)
    return batch_s * data.num_examples / size


@cache
def run(data: DataSet, policy: PolicyName) -> tuple[Plan, Timeline]:
    """Return what CPU and GPU do together within the horizon."""
    machine, work = devices("cpu0", "gpu0"), workload(data, data.gpu_batch[1])
    tasks = plan_until(work, machine, configuration(data, policy), HORIZON_S)
    return tasks, simulate(tasks, Roofline.of(machine), until=HORIZON_S)


def run_alone(data: DataSet, size: int) -> tuple[Plan, Timeline]:
    """Return what the GPU does by itself with batches of that size."""
    machine, config = devices("gpu0"), Hogbatch(workers=1, policy="hogbatch")
    tasks = plan(workload(data, size), machine, config, Window(8))
    return tasks, simulate(tasks, Roofline.of(machine))


def kernels(tasks: Plan, timeline: Timeline) -> float:
    """Return the share of the time in which a kernel runs on the GPU, as its driver counts it.

    While the host launches one, or waits for it, none does; nor while data are copied.
    """
    lane = compute_lane("gpu0")
    rate = Roofline.of(devices("gpu0")).rates[lane]
    spans = timeline.tracks[lane]
    return sum(rate.work_s(tasks[span.name].cost) for span in spans) / timeline.makespan_s


def configuration(data: DataSet, policy: PolicyName) -> Hogbatch:
    """Return the paper's configuration of CPU and GPU for a data set (table II)."""
    return Hogbatch(
        workers=2,
        policy=policy,
        threads=THREADS,
        cpu_batch=data.cpu_batch,
        gpu_batch=data.gpu_batch,
    )


def cpu_share(data: DataSet, policy: PolicyName) -> float:
    """Return what part of all updates the CPU makes."""
    per_batch = updates_per_batch(devices("cpu0", "gpu0"), configuration(data, policy))
    return statistics.update_shares(run(data, policy)[1], per_batch)["cpu0"]


def _epochs() -> Table:
    ratios = [epoch_s(data, "cpu0") / epoch_s(data, "gpu0") for data in DATA_SETS]
    shortest = min(DATA_SETS, key=lambda data: epoch_s(data, "cpu0"))
    return Table(
        "Section VII-B: an epoch of Hogwild on the CPU over one of mini-batch SGD on the GPU",
        (
            Cell("lowest of the four data sets", 236, min(ratios), Basis.PREDICTED),
            Cell("highest of the four data sets", 317, max(ratios), Basis.PREDICTED),
            Cell("closest to an epoch in its time", "delicious", shortest.name, Basis.PREDICTED),
        ),
    )


def _updates() -> Table:
    cells = []
    for data in DATA_SETS:
        share = cpu_share(data, "cpu_gpu")
        words = "almost all" if share >= ALMOST_ALL else "not almost all"
        name = f"CPU+GPU, {data.name} ({100 * share:.0f} %)"
        cells.append(Cell(name, "almost all", words, Basis.PREDICTED))
    for data in DATA_SETS:
        basis = Basis.CALIBRATED if data.name == "delicious" else Basis.PREDICTED
        share = cpu_share(data, "adaptive")
        cells.append(Cell(f"Adaptive, {data.name}", 50, 100 * share, basis))
    return Table("Figure 8: the CPU's share of all updates (%)", tuple(cells))


def _utilisation() -> Table:
    covtype = DATA_SETS[0]
    together, adaptive = run(covtype, "cpu_gpu"), run(covtype, "adaptive")
    cpu = statistics.utilisation(together[1])["cpu0"] * THREADS / CPU_THREADS
    lower, upper = (kernels(*run_alone(covtype, size)) for size in covtype.gpu_batch)
    fell = kernels(*adaptive) < kernels(*together)
    return Table(
        "Figure 7 and section VII-A: utilisation with covtype (%)",
        (
            Cell("CPU in CPU+GPU", 80, 100 * cpu, Basis.PREDICTED),
            Cell("GPU at the lower threshold", 50, 100 * lower, Basis.CALIBRATED),
            Cell("GPU at the upper threshold", 100, 100 * upper, Basis.PREDICTED),
            _above("GPU alone", upper),
            _above("GPU in CPU+GPU", kernels(*together)),
            Cell(
                "GPU in Adaptive, beside CPU+GPU",
                "lower",
                "lower" if fell else "higher",
                Basis.PREDICTED,
            ),
        ),
    )


def _above(name: str, share: float) -> Cell:
    words = "above 80" if share > 0.8 else "below 80"
    return Cell(f"{name} ({100 * share:.0f} %)", "above 80", words, Basis.PREDICTED)
