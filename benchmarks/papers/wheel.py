"""Simulate Du et al., "Wheel: Accelerating CNNs with Distributed GPUs" (MM 2017)."""

from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil

from paceline.core.cost import Roofline, link_lane
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan, TaskId
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.split import split
from paceline.training.recipes.named import workload_of
from papers.paper_tables import Paper, paper_of, printed_values

_BATCH = 256
_NUM_ITERATIONS = 20  # 5,120 images, section 4.3
_WINDOW = 16  # steps
_NUM_BODY_GPUS = 3
_PARTITIONED = Wheel(workers=1, lanes=1)
_TWO_GPUS = Wheel(workers=2, lanes=2)
_FOUR_GPUS = Wheel(workers=2 * _NUM_BODY_GPUS, lanes=2)


def paper() -> Paper:
    """Return the paper's tables with our values."""
    runs = Runs.calibrated()
    one, worker_s = Wheel(workers=1), runs.period_s(_FOUR_GPUS)
    head = {layer.name for layer in split(runs.workload, one).head.layers}
    tasks = runs.plan(one, 1).tasks
    # Seconds of one answer of a fully-connected worker: the paper's p.
    answer_s = sum(runs.cost.seconds(task) for task in tasks if task.part in head)
    step_s = worker_s / _FOUR_GPUS.lanes
    needed = ceil(answer_s * _NUM_BODY_GPUS / step_s)  # p k / t
    return paper_of(
        "wheel",
        {
            "section 4.1, times": {
                "Caffe": runs.caffe_s,
                "partitioned over two servers": runs.forward_to_backward_s(_PARTITIONED),
            },
            "section 4.1, network": {
                "up": runs.ethernet_bytes_per_s(_FOUR_GPUS, "station1", "station0") / 1e6,
            },
            "figure 8": figure_8(runs),
            "section 3.4.1": {"GPUs for fully-connected workers, k = 3": str(needed)},
        },
    )


def figure_8(runs: "Runs") -> dict[str, float]:
    """Return the seconds for 5,120 images, by bar."""
    return {
        "Caffe": _NUM_ITERATIONS * runs.caffe_s,
        "partitioned, two GPUs": runs.images_s(_PARTITIONED),
        "Wheel, two GPUs": runs.images_s(_TWO_GPUS),
        "Wheel, four GPUs": runs.images_s(_FOUR_GPUS),
    }


@dataclass(frozen=True)
class Runs:
    """AlexNet on the paper's machine, with a hand-over time between alternating workers."""

    workload: Workload
    machine: Machine

    @classmethod
    def calibrated(cls) -> "Runs":
        """Fit the hand-over time to figure 8's 16.99 s for two GPUs.

        There, two workers alternate. Each hands over twice per step; the device is never idle.
        """
        workload, machine = workload_of("alexnet", _BATCH, None), find_machine("k40-gigabit")
        at_once = cls(workload, machine.with_each("devices", sync_latency_s=0.0))
        alternate_s = printed_values("wheel", "figure 8")["Wheel, two GPUs",]
        missing_s = alternate_s / _NUM_ITERATIONS - at_once.period_s(_TWO_GPUS) / 2
        return cls(workload, machine.with_each("devices", sync_latency_s=missing_s / 2))

    @cached_property
    def cost(self) -> Roofline:
        """The cost model of this machine."""
        return Roofline.of(self.machine)

    @cached_property
    def caffe_s(self) -> float:
        """Seconds of Caffe's iteration on one GPU, without a cut."""
        whole = partial(allreduce.plan, self.workload, self.machine, AllReduce(workers=1))
        return period(lambda num_steps: whole(Window(num_steps)), self.cost, _WINDOW)

    def plan(self, config: Wheel, num_steps: int) -> Plan:
        """Return the plan of `num_steps` steps."""
        return plan(self.workload, self.machine, config, Window(num_steps))

    def period_s(self, config: Wheel) -> float:
        """Return the seconds of one iteration of each worker."""
        return period(lambda num_steps: self.plan(config, num_steps), self.cost, _WINDOW)

    def images_s(self, config: Wheel) -> float:
        """Return figure 8's seconds: 20 iterations in total, shared by all workers."""
        return _NUM_ITERATIONS * self.period_s(config) / config.workers

    def forward_to_backward_s(self, config: Wheel) -> float:
        """Return the seconds from the start of a forward to the end of its backward (figure 5)."""
        timeline = simulate(self.plan(config, _WINDOW), self.cost)
        spans = {span.id: span for span in timeline.spans}
        step, first = _WINDOW // 2, self.workload.layers[0].name
        begin = spans[TaskId(step, Kind.FORWARD, first, 0)].start_s
        return spans[TaskId(step, Kind.BACKWARD, first, 0)].end_s - begin

    def ethernet_bytes_per_s(self, config: Wheel, source: str, target: str) -> float:
        """Return the bytes per second over the Ethernet in one direction."""
        lane = link_lane(source, target)
        tasks = self.plan(config, 1).tasks
        nbytes = sum(task.cost.nbytes for task in tasks if lane in task.on)
        return nbytes / self.period_s(config)
