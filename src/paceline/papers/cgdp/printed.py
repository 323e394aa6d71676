"""What Le et al. 2018 print, in milliseconds unless a name says otherwise."""

from typing import NamedTuple

TREE, HOST = "tree", "host"
FRAMEWORK = {TREE: "BVLC/Caffe", HOST: "TRL/Caffe"}
NAMES = {"alexnet": "AlexNet", "googlenet": "GoogLeNet-v1", "vgg16": "VGGNet-16"}
WORKERS = (1, 2, 4)

# Running time for one training iteration on 1, 2 and 4 GPUs.
TABLE_2 = {
    (TREE, "alexnet"): (157.2, 174.3, 202.7),
    (TREE, "googlenet"): (140.0, 151.7, 163.4),
    (TREE, "vgg16"): (345.6, 383.7, 445.6),
    (HOST, "alexnet"): (157.4, 163.6, 167.1),
    (HOST, "googlenet"): (140.9, 151.9, 156.7),
    (HOST, "vgg16"): (345.2, 361.5, 369.1),
}
SPEEDUPS = {"alexnet": 1.21, "googlenet": 1.04, "vgg16": 1.21}


class Phases(NamedTuple):
    """Table 3: the phases of one iteration of AlexNet on four GPUs.

    `broadcast` of the host's run is that of the gradients that remain after backward.
    """

    broadcast: float
    forward: float
    backward: float
    accumulate: float
    update: float


TABLE_3 = {
    TREE: Phases(20.0, 50.6, 104.0, 23.0, 5.1),
    HOST: Phases(0.0218, 51.0, 111.0, 0.0, 5.1),
}


class Moves(NamedTuple):
    """Table 4: what AlexNet's gradients take on four GPUs, for one layer."""

    to_host: float
    accumulate: float
    to_gpu: float


# Layers 8 to 1, as backward goes.
TABLE_4 = (
    Moves(0.760, 1.263, 1.786),
    Moves(3.156, 4.441, 2.568),
    Moves(12.146, 13.074, 5.538),
    Moves(0.133, 0.285, 0.064),
    Moves(0.174, 0.465, 0.095),
    Moves(0.275, 0.578, 0.123),
    Moves(0.066, 0.155, 0.041),
    Moves(0.014, 0.018, 0.007),
)

# Megabytes in a GPU: of tree, and of host.
TABLE_5 = {"alexnet": (6863, 6359), "googlenet": (6095, 5991), "vgg16": (7274, 6191)}

# Section 5.2.5 and figure 4a: minutes for 21,000 iterations, with 21 tests of 14.7 s each.
LONG_RUN = {TREE: 79.0, HOST: 62.0}
NUM_ITERATIONS, NUM_TESTS, TEST_S = 21_000, 21, 14.7

# Section 5.3: ResNet-152 on four GPUs, the tree's time over the host's with the best chunk.
RESNET_SPEEDUP = 1.07
