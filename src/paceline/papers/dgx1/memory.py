"""Table IV: memory that grows by the same number of bytes with each image.

What a GPU holds before training (the context, the libraries and the weights) is an input. What
MXNet keeps of each image is taken from the batch of 16. GPU 0 in addition holds the gradients that
the three others send to it.
"""

from paceline.papers.dgx1.networks import workload
from paceline.papers.dgx1.printed import MEMORY
from paceline.papers.dgx1.steps import dgx1

CALIBRATED_ON = 16  # images
_GB = 1e9
_GPUS = 4


def others_gb(network: str, batch_size: int) -> float:
    """Return what a GPU other than GPU 0 holds in training."""
    known = MEMORY[network][CALIBRATED_ON]
    per_image = (known.others - known.before) / CALIBRATED_ON
    return known.before + batch_size * per_image


def gpu0_gb(network: str, batch_size: int) -> float:
    """Return what GPU 0 holds, to which the others send their gradients."""
    gradients = workload(network, CALIBRATED_ON).gradient_nbytes
    return others_gb(network, batch_size) + (_GPUS - 1) * gradients / _GB


def growth(network: str, batch_size: int) -> float:
    """Return what GPU 0 holds, over what it holds with the smallest batch."""
    return gpu0_gb(network, batch_size) / gpu0_gb(network, CALIBRATED_ON)


def largest_batch(network: str) -> int:
    """Return the largest power of two that fits into GPU 0."""
    capacity_gb = dgx1().devices[0].memory_bytes / _GB
    batch_size = 1
    while gpu0_gb(network, 2 * batch_size) <= capacity_gb:
        batch_size *= 2
    return batch_size
