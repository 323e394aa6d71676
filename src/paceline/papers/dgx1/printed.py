"""What the paper prints."""

from typing import Literal, NamedTuple

Method = Literal["P2P", "NCCL"]


class Counts(NamedTuple):
    """A row of Table I; weights to the digits that are printed."""

    layers: int
    convolutions: int
    inceptions: int
    fully_connected: int
    weights: float


# Table I.
COUNTS = {
    "LeNet": Counts(5, 2, 0, 2, 60e3),
    "AlexNet": Counts(8, 5, 0, 3, 60e6),
    "GoogLeNet": Counts(22, 3, 9, 1, 4e6),
    "Inception-v3": Counts(48, 7, 11, 1, 24e6),
    "ResNet": Counts(110, 107, 0, 1, 55e6),
}
# To which power of ten Table I gives the weights.
WEIGHTS_DIGIT = {"LeNet": 4, "AlexNet": 7, "GoogLeNet": 6, "Inception-v3": 6, "ResNet": 6}

# Section V-A: images in a batch of one GPU.
BATCH_SIZES = (16, 32, 64)

# Section V-A: LeNet with batches of 16, speed-up over one GPU by number of GPUs.
LENET_SPEEDUPS: dict[Method, dict[int, float]] = {
    "P2P": {2: 1.62, 4: 2.37, 8: 3.36},
    "NCCL": {2: 1.56, 4: 2.27, 8: 2.77},
}
# Section V-A: LeNet on four GPUs with P2P, by what an epoch is shorter than with batches of 16.
LENET_BATCHES = {32: 1.92, 64: 3.67}
# Section V-A: "As we increase the number of GPUs from 1 to 2, for all the workloads, we observe up
# to a 1.8x speedup", with P2P.
BEST_ON_TWO = 1.8
# Section V-A: which method is faster on four and on eight GPUs.
FASTER: dict[str, Method] = {
    "LeNet": "P2P",
    "AlexNet": "P2P",
    "GoogLeNet": "NCCL",
    "Inception-v3": "NCCL",
    "ResNet": "NCCL",
}
# Section V-A: by how much NCCL is, with batches of 16, by number of GPUs.
NCCL_GAINS = {
    "GoogLeNet": {4: 1.1, 8: 1.2},
    "Inception-v3": {4: 1.1, 8: 1.25},
    "ResNet": {4: 1.1, 8: 1.25},
}

# Table II: per cent that NCCL takes longer than P2P on one GPU, by batch size.
OVERHEADS = {
    "LeNet": {16: 16.4, 32: 24.0, 64: 26.7},
    "AlexNet": {16: 21.8, 32: 21.8, 64: 31.8},
    "ResNet": {16: 20.1, 32: 22.9, 64: 19.3},
    "GoogLeNet": {16: 18.7, 32: 17.5, 64: 16.2},
    "Inception-v3": {16: 16.9, 32: 19.4, 64: 18.9},
}


class Memory(NamedTuple):
    """A row of Table IV, in GB; `growth` is in per cent of the batch of 16."""

    before: float
    gpu0: float
    others: float
    growth: float | None


# Table IV, by batch size.
MEMORY = {
    "LeNet": {
        16: Memory(1.37, 2.76, 1.96, None),
        32: Memory(1.38, 2.84, 2.04, 3.0),
        64: Memory(1.40, 2.89, 2.36, 4.8),
    },
    "AlexNet": {
        16: Memory(1.24, 2.15, 1.55, None),
        32: Memory(1.25, 2.36, 1.76, 9.9),
        64: Memory(1.27, 2.97, 2.37, 38.2),
    },
    "ResNet": {
        16: Memory(1.08, 3.62, 3.29, None),
        32: Memory(5.98, 5.66, 5.63, 56.1),
        64: Memory(11.06, 9.48, 9.15, 161.5),
    },
    "GoogLeNet": {
        16: Memory(0.92, 2.35, 2.24, None),
        32: Memory(0.94, 3.64, 3.55, 55.2),
        64: Memory(0.97, 6.17, 6.07, 162.8),
    },
    "Inception-v3": {
        16: Memory(1.04, 3.89, 3.60, None),
        32: Memory(1.06, 6.70, 6.06, 72.3),
        64: Memory(1.09, 11.01, 10.78, 183.3),
    },
}
# Section V-D: the largest batch that could be trained; sizes are powers of two.
LARGEST_BATCH = {"Inception-v3": 64, "ResNet": 64, "GoogLeNet": 128}
