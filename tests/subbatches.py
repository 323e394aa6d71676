"""Models whose head can be split, and rings of devices, for tests of strategy subbatch."""

from boxes import box, ring
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Parameter, Workload

BATCH, FEATURES, WIDTH, CLASSES = 12, 20, 24, 12
WIRE = 1000.0  # bytes per second


def layer(name: str, *shapes: tuple[int, ...], out: int, seconds: float = 1.0) -> Layer:
    parameters = tuple(Parameter(f"{name}.p{i}", shape) for i, shape in enumerate(shapes))
    return Layer(name, parameters, 4 * BATCH * out, Cost(seconds * 1e9), Cost(2 * seconds * 1e9))


CONV = layer("conv", (8, 3, 5, 5), (8,), out=FEATURES)
FC1 = layer("fc1", (WIDTH, FEATURES), (WIDTH,), out=WIDTH)
FC2 = layer("fc2", (CLASSES, WIDTH), (CLASSES,), out=CLASSES)


def model(*layers: Layer) -> Workload:
    return Workload("net", BATCH, layers, tuple(reversed(range(len(layers)))), 0)


NET = model(CONV, FC1, FC2)


def ring_of(count: int, nbytes_per_s: float = WIRE, **device) -> Machine:
    links = ring([f"gpu{i}" for i in range(count)], nbytes_per_s)
    return box(*["gpu"] * count, links=links, device=device)
