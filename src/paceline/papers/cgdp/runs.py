"""Training steps on the machine of Le et al. 2018: plans, priced and simulated.

Layers share what an iteration takes on one GPU as a P100's arithmetic and memory would have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import fsum
from typing import Any

from paceline.core.cost import Measured, Rate, Roofline, compute_lane
from paceline.core.machine import Machine
from paceline.core.pace import LayerTimes, Totals, layer_times
from paceline.core.plan import Kind, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.core.workload import Workload
from paceline.machine_file import find_machine
from paceline.papers.cgdp.networks import Network, network
from paceline.papers.cgdp.printed import HOST, TABLE_2, TABLE_3, TABLE_4, TREE
from paceline.strategies import STRATEGIES
from paceline.strategies.host.config import Host
from paceline.strategies.tree.config import Tree

_WINDOW = 1  # step: none begins before all updates of the one before
_PHASES = TABLE_3[TREE]
_COMPUTE = _PHASES.forward + _PHASES.backward
# Table 3's phases take so much more on four GPUs than table 2's iteration on one: computing is
# slower beside another GPU.
BESIDE_OTHERS = (_COMPUTE + _PHASES.update) / TABLE_2[TREE, "alexnet"][0]


@cache
def machine() -> Machine:
    """Return the paper's machine."""
    return find_machine("power8-p100")


@cache
def rate() -> Rate:
    """Return how fast a P100 computes AlexNet."""
    return Roofline.of(machine()).rates[compute_lane(machine().devices[0].name)]


def update_s(workload: Workload) -> float:
    """Return what updating the weights takes on a GPU alone: in proportion to their number."""
    alexnet = network("alexnet").workload
    share = workload.num_parameters / alexnet.num_parameters
    return _PHASES.update / 1e3 / BESIDE_OTHERS * share


@cache
def times_alone(name: str) -> LayerTimes:
    """Return what the layers take on one GPU, of an iteration as table 2 prints it."""
    known = network(name)
    step_s = TABLE_2[TREE, name][0] / 1e3
    rest_s = step_s - update_s(known.workload)
    totals = Totals(
        rest_s * _PHASES.forward / _COMPUTE,
        rest_s * _PHASES.backward / _COMPUTE,
        update_s(known.workload),
    )
    return known.merged(layer_times(known.fine, rate(), totals))


def call_s() -> float:
    """Return the seconds that each call must take for GoogLeNet to take what table 2 prints.

    Networks of small layers are slower than AlexNet's arithmetic, and memory traffic, would be.
    """
    fine = network("googlenet").fine
    num_calls = sum(layer.forward.num_calls + layer.backward.num_calls for layer in fine.layers)
    without = layer_times(fine, replace(rate(), call_latency_s=0.0))
    rest_s = TABLE_2[TREE, "googlenet"][0] / 1e3 - update_s(fine)
    return (rest_s - fsum(without.forward_s) - fsum(without.backward_s)) / num_calls


@cache
def times_of_resnet(batch_size: int) -> LayerTimes:
    """Return what ResNet-152's layers take on one GPU, of which the paper prints nothing."""
    known = network("resnet152", batch_size)
    times = layer_times(known.fine, replace(rate(), call_latency_s=call_s()))
    return known.merged(times._replace(update_s=update_s(known.workload)))


@dataclass(frozen=True)
class Run:
    """A network whose layers take known times, on some GPUs of the paper's machine.

    `moves` prices copies and sums of chunks, where they are known: see `Measured`.
    """

    network: Network
    times: LayerTimes
    strategy: str
    workers: int
    chunk: int = 1
    moves: Mapping[tuple[str, Kind, str], float] | None = None

    @property
    def config(self) -> Any:
        """The strategy's configuration."""
        if self.strategy == HOST:
            return Host(workers=self.workers, chunk=self.chunk)
        return Tree(workers=self.workers)

    def plan(self, num_steps: int) -> Plan:
        """Return the plan of so many steps."""
        plan = STRATEGIES[self.strategy].plan
        return plan(self.network.workload, machine(), self.config, Window(num_steps))

    @property
    def cost(self) -> Measured:
        """The prices of all tasks."""
        slower = BESIDE_OTHERS if self.workers > 1 else 1.0
        durations = dict(self.moves or {})
        for device in machine().devices:
            durations[device.name, Kind.LOAD, ""] = 0.0  # read beside the step before
            durations[device.name, Kind.STEP, ""] = slower * self.times.update_s
            for i, layer in enumerate(self.network.workload.layers):
                forward_s, backward_s = self.times.forward_s[i], self.times.backward_s[i]
                durations[device.name, Kind.FORWARD, layer.name] = slower * forward_s
                durations[device.name, Kind.BACKWARD, layer.name] = slower * backward_s
        return Measured(durations, Roofline.of(machine()))

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step in the steady state."""
        return 1e3 * period(self.plan, self.cost, _WINDOW)

    def timeline(self, num_steps: int) -> Timeline:
        """Return what happens in so many steps."""
        return simulate(self.plan(num_steps), self.cost)


def moves_of_table_4() -> dict[tuple[str, Kind, str], float]:
    """Return the seconds of AlexNet's copies and sums on four GPUs: chunk 0 is layer 8."""
    (host,) = machine().hosts
    moves = {}
    for chunk, layer in enumerate(TABLE_4):
        moves[host.name, Kind.REDUCE, str(chunk)] = layer.accumulate / 1e3
        for device in machine().devices:
            moves[device.name, Kind.D2H, str(chunk)] = layer.to_host / 1e3
            moves[device.name, Kind.H2D, str(chunk)] = layer.to_gpu / 1e3
    return moves


@cache
def run(name: str, strategy: str, workers: int) -> Run:
    """Return the run of a cell of table 2; for AlexNet on four GPUs with table 4's copies."""
    printed = strategy == HOST and name == "alexnet" and workers == 4
    moves = moves_of_table_4() if printed else None
    return Run(network(name), times_alone(name), strategy, workers, moves=moves)
