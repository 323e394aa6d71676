"""A small model with a head, and step times of plans, for tests of strategy wheel."""

from boxes import FLOPS_PER_S
from paceline.core.cost import Roofline, update_cost
from paceline.core.machine import Machine
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import plan

SAMPLES = 10
CROSSING = 4 * 5000
WEIGHTS = {"c0": (8, 3, 5, 5), "c1": (10, 8, 5, 5), "f0": (400, 250), "f1": (10, 400)}
BODY = 4 * (8 * 3 * 25 + 10 * 8 * 25)
HEAD = 4 * (400 * 250 + 10 * 400)


def layer(name: str, shape: tuple[int, ...], handed_on: int, seconds: float) -> Layer:
    """Return a layer with one tensor; forward takes `seconds`, backward twice as long."""
    flops = seconds * FLOPS_PER_S
    return Layer(name, (Parameter("w", shape),), handed_on, Cost(flops), Cost(2 * flops))


def model(body_s: float = 1.0, head_s: float = 0.1, names=tuple(WEIGHTS)) -> Workload:
    """Return two convolutions (body) and two matrices (head) with these seconds of forward."""
    handed_on = {"c0": 8 * CROSSING, "c1": CROSSING, "f0": 16000, "f1": 400}
    seconds = {"c0": body_s / 2, "c1": body_s / 2, "f0": head_s / 2, "f1": head_s / 2}
    layers = tuple(layer(name, WEIGHTS[name], handed_on[name], seconds[name]) for name in names)
    order = tuple(reversed(range(len(layers))))
    return Workload("small", SAMPLES, layers, order, 3000)


UPDATE_S = update_cost(model()).flops / FLOPS_PER_S


def period_of(work: Workload, machine: Machine, config: Wheel, steps: int = 8) -> float:
    """Return the seconds of a step in a simulation of steady training."""
    return period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), steps)
