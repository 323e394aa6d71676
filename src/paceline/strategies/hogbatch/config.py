"""The configuration of strategy hogbatch."""

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

PolicyName = Literal["hogwild", "hogbatch", "cpu_gpu", "proportional", "adaptive"]


def _in_order(thresholds: tuple[int, int]) -> tuple[int, int]:
    least, most = thresholds
    if not 1 <= least <= most:
        raise ValueError(
            f"a batch of at least {least} and at most {most} samples cannot be; "
            "write the smaller one first, at least 1, as in (1, 64)"
        )
    return thresholds


Thresholds = Annotated[tuple[int, int], AfterValidator(_in_order)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Hogbatch:
    """A coordinator hands out batches to whoever is free; `policy` says how large they are.

    `threads` are those of a worker on cores, by default its share of the host's. `cpu_batch` and
    `gpu_batch` are the smallest and the largest batch: the first of each thread, the second of a
    GPU, by default a 64th of the workload's batch and all of it. Policy `cpu_gpu` gives CPUs the
    smallest and GPUs the largest. `alpha` is the factor by which `adaptive` changes a batch, and
    `beta` the fraction of a CPU worker's updates that survive (Ma, Rusu et al. 2020, algorithm 2).
    The learning rate of a worker whose latest batch missed k updates of others is divided by
    1 + k * `staleness_decay`.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    policy: PolicyName = "adaptive"
    threads: Annotated[int, Field(ge=1)] | None = None
    cpu_batch: Thresholds = (1, 64)
    gpu_batch: Thresholds | None = None
    alpha: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    beta: Annotated[float, Field(gt=0, le=1)] = 1.0
    staleness_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
