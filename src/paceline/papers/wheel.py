"""Du et al., "Wheel: Accelerating CNNs with Distributed GPUs" (MM 2017): its tables and ours."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from paceline.core.cost import Roofline, link_lane
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind, Plan, task_name
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter, Workload
from paceline.machine_file import find_machine
from paceline.models.workload import workload_of
from paceline.papers.cells import Basis, Cell, Paper, Table
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.placement import head_devices_needed
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.split import Purpose, messages, split

_BATCH = 256
_NUM_ITERATIONS = 20  # 5,120 images, section 4.3
_ALTERNATE_S = 16.99  # figure 8, two GPUs: calibrates what handing over takes
_WINDOW = 16  # steps
_NUM_BODY_GPUS = 3

# "Alexnet" as Table 1 counts it: one group a layer, where Caffe's has two in three of them.
_SHAPES = {
    "conv1": ((96, 3, 11, 11), 96 * 27 * 27),
    "conv2": ((256, 96, 5, 5), 256 * 13 * 13),
    "conv3": ((384, 256, 3, 3), 384 * 13 * 13),
    "conv4": ((384, 384, 3, 3), 384 * 13 * 13),
    "conv5": ((256, 384, 3, 3), 256 * 6 * 6),
    "fc6": ((4096, 256 * 6 * 6), 4096),
    "fc7": ((4096, 4096), 4096),
    "fc8": ((1000, 4096), 1000),
}


def paper() -> Paper:
    """Return the paper's tables beside our values."""
    alexnet = workload_of("alexnet", _BATCH, None)
    runs = _Runs.calibrated(alexnet, find_machine("k40-gigabit"))
    return Paper(
        name="wheel",
        citation=(
            'Du, Tang, Li, Qin: "Wheel: Accelerating CNNs with Distributed GPUs via Hybrid '
            'Parallelism and Alternate Strategy", MM 2017'
        ),
        tables=(_table_1(), *_section_4_1(runs), _figure_8(runs), _table_2(runs), _rule(runs)),
        calibrated=(
            ("flops a second of a K40c", "figure 8: 16.84 s with Caffe"),
            ("handing over at the end of a turn", "figure 8: 16.99 s with two alternating workers"),
        ),
    )


def calibrated_machine() -> Machine:
    """Return the paper's machine, whose devices take the calibrated time to hand over."""
    alexnet = workload_of("alexnet", _BATCH, None)
    return _Runs.calibrated(alexnet, find_machine("k40-gigabit")).machine


def ungrouped_alexnet() -> Workload:
    """Return AlexNet as Table 1 counts it; without costs, as the table asks for bytes alone."""
    layers = tuple(
        Layer(
            name,
            (Parameter("weight", shape), Parameter("bias", shape[:1])),
            4 * _BATCH * handed_on,
            Cost(),
            Cost(),
        )
        for name, (shape, handed_on) in _SHAPES.items()
    )
    order = tuple(reversed(range(len(layers))))
    return Workload("alexnet", _BATCH, layers, order, 4 * _BATCH * prod((3, 227, 227)))


def _table_1() -> Table:
    config = Wheel()
    sent = messages(split(ungrouped_alexnet(), config), config)
    columns = {
        "data": {
            "Sample Labels": (Purpose.LABELS, 1),
            "Convolutional Parameters": (Purpose.BODY_PARAMETERS, 3.7),
            "Convolutional Gradients": (Purpose.BODY_GRADIENTS, 3.7),
            "Fully-Connected Parameters": (Purpose.HEAD_PARAMETERS, 58.6),
            "Fully-Connected Gradients": (Purpose.HEAD_GRADIENTS, 58.6),
            "Total": (None, 124.8),
        },
        "hybrid": {
            "Sample Labels": (Purpose.LABELS, 1),
            "Convolutional Parameters": (Purpose.BODY_PARAMETERS, 3.7),
            "Convolutional Gradients": (Purpose.BODY_GRADIENTS, 3.7),
            "Convolutional Outputs": (Purpose.ACTIVATIONS, 2.4),
            "Fully-Connected Residuals": (Purpose.RESIDUALS, 2.4),
            "Total": (None, 12.2),
        },
    }
    cells = []
    for parallelism, rows in columns.items():
        purposes = [purpose for purpose, _ in rows.values() if purpose is not None]
        total = sum(sent[purpose].num_values for purpose in purposes)
        for row, (purpose, printed) in rows.items():
            values = total if purpose is None else sent[purpose].num_values
            ours = round(values / 1e6, 1)
            # The table counts values, but for labels, of which 256 are 1K bytes.
            if purpose is Purpose.LABELS:
                ours = round(sent[purpose].nbytes / 2**10, 1)
            cells.append(Cell(f"{parallelism}: {row}", printed, ours, Basis.EXACT))
    return Table("Table 1: data on Ethernet [K bytes for labels, else M values]", tuple(cells))


@dataclass(frozen=True)
class _Runs:
    """AlexNet on the machine, whose devices take the calibrated time to hand over."""

    workload: Workload
    machine: Machine

    @classmethod
    def calibrated(cls, workload: Workload, machine: Machine) -> "_Runs":
        """Return the runs: a turn's end takes what makes two alternating workers take 16.99 s.

        A body worker hands over twice in a step, and its device is never idle.
        """
        at_once = cls(workload, _handing_over(machine, 0.0))
        missing_s = _ALTERNATE_S / _NUM_ITERATIONS - at_once.period_s(Wheel(workers=2)) / 2
        return cls(workload, _handing_over(machine, missing_s / 2))

    @cached_property
    def cost(self) -> Roofline:
        """The prices on this machine."""
        return Roofline.of(self.machine)

    @cached_property
    def caffe_s(self) -> float:
        """One iteration on one GPU, where nothing is cut."""

        def window(num_steps: int) -> Plan:
            config = AllReduce(workers=1)
            return allreduce.plan(self.workload, self.machine, config, Window(num_steps))

        return period(window, self.cost, _WINDOW)

    def plan(self, config: Wheel, num_steps: int) -> Plan:
        """Return the plan of so many steps."""
        return plan(self.workload, self.machine, config, Window(num_steps))

    def period_s(self, config: Wheel) -> float:
        """Return the seconds of one iteration of each worker."""
        return period(lambda num_steps: self.plan(config, num_steps), self.cost, _WINDOW)

    def images_s(self, config: Wheel) -> float:
        """Return the seconds of 20 iterations by all workers together, as figure 8 counts them."""
        return _NUM_ITERATIONS * self.period_s(config) / config.workers

    def forward_to_backward_s(self, config: Wheel) -> float:
        """Return the seconds from the start of a forward to the end of its backward (figure 5)."""
        timeline = simulate(self.plan(config, _WINDOW), self.cost)
        spans = {span.name: span for span in timeline.spans}
        step, first = _WINDOW // 2, self.workload.layers[0].name
        begin = spans[task_name(step, Kind.FORWARD, first, 0)].start_s
        return spans[task_name(step, Kind.BACKWARD, first, 0)].end_s - begin

    def ethernet_bytes_per_s(self, config: Wheel, source: str, target: str) -> float:
        """Return what goes over the Ethernet in one direction."""
        lane = link_lane(source, target)
        tasks = self.plan(config, 1).tasks
        nbytes = sum(task.cost.nbytes for task in tasks if lane in task.on)
        return nbytes / self.period_s(config)

    def answer_s(self) -> float:
        """Return what one answer of a fully-connected worker takes (p)."""
        config = Wheel(workers=1)
        head = {layer.name for layer in split(self.workload, config).head.layers}
        tasks = self.plan(config, 1).tasks
        return sum(self.cost.seconds(task) for task in tasks if task.part in head)


def _handing_over(machine: Machine, seconds: float) -> Machine:
    fact = {"sync_latency_s": seconds}
    devices = tuple(device.model_copy(update=fact) for device in machine.devices)
    return machine.model_copy(update={"devices": devices})


_PARTITIONED = Wheel(workers=1, lanes=1)
_TWO_GPUS = Wheel(workers=2, lanes=2)
_FOUR_GPUS = Wheel(workers=2 * _NUM_BODY_GPUS, lanes=2)


def _section_4_1(runs: _Runs) -> tuple[Table, Table]:
    partitioned_s = runs.forward_to_backward_s(_PARTITIONED)
    worker_s = runs.period_s(_FOUR_GPUS)
    up, down = (
        runs.ethernet_bytes_per_s(_FOUR_GPUS, *ends) / 1e6
        for ends in (("station1", "station0"), ("station0", "station1"))
    )
    times = (
        Cell("Caffe", 0.85, runs.caffe_s, Basis.CALIBRATED),
        Cell("partitioned over two servers", 1.08, partitioned_s, Basis.PREDICTED),
        Cell("Wheel, a worker", 1.69, worker_s, Basis.PREDICTED),
        Cell("Wheel, a GPU", 0.845, worker_s / _FOUR_GPUS.lanes, Basis.PREDICTED),
    )
    network = (
        Cell("up", 42, up, Basis.PREDICTED),
        Cell("down", 42, down, Basis.PREDICTED),
    )
    return (
        Table("Section 4.1: one training iteration [s]", times),
        Table("Section 4.1: Ethernet with four GPUs [MB/s]", network),
    )


def _figure_8(runs: _Runs) -> Table:
    caffe_s = _NUM_ITERATIONS * runs.caffe_s
    cells = (
        Cell("Caffe", 16.84, caffe_s, Basis.CALIBRATED),
        Cell("partitioned, two GPUs", 24.06, runs.images_s(_PARTITIONED), Basis.PREDICTED),
        Cell("Wheel, two GPUs", _ALTERNATE_S, runs.images_s(_TWO_GPUS), Basis.CALIBRATED),
        Cell("Wheel, four GPUs", 5.48, runs.images_s(_FOUR_GPUS), Basis.PREDICTED),
    )
    return Table("Figure 8: 5,120 images [s]", cells)


def _table_2(runs: _Runs) -> Table:
    caffe_s = _NUM_ITERATIONS * runs.caffe_s
    cells = (
        Cell("Wheel, 2 GPUs", 0.99, caffe_s / runs.images_s(_TWO_GPUS), Basis.CALIBRATED),
        Cell("Wheel, 4 GPUs", 3.07, caffe_s / runs.images_s(_FOUR_GPUS), Basis.PREDICTED),
    )
    return Table("Table 2: times faster than Caffe", cells)


def _rule(runs: _Runs) -> Table:
    step_s = runs.period_s(_FOUR_GPUS) / _FOUR_GPUS.lanes
    needed = head_devices_needed(runs.answer_s(), _NUM_BODY_GPUS, step_s)
    cell = Cell("GPUs for fully-connected workers, k = 3", "1", str(needed), Basis.PREDICTED)
    return Table("Section 3.4.1: the rule p k / t, beside section 4.1's placement", (cell,))
