"""Run strategy subbatch: split the model, and train it with the others.

The body is replicated, and its gradients are averaged layer by layer. Of the head's layers each
rank has some outputs: their parameters, gradients and momentum are nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.workload import Workload
from paceline.exchange.method import Method
from paceline.exchange.replica import Alone, Replica
from paceline.exchange.synchronized import Synchronized
from paceline.links.group import Group
from paceline.strategies.subbatch.chain import apart
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.gradients import LayerGradients
from paceline.strategies.subbatch.head import cut, num_outputs, shares
from paceline.strategies.subbatch.lane import Lane
from paceline.strategies.subbatch.learner import Learner, Parallel
from paceline.strategies.subbatch.narrow import narrowed
from paceline.strategies.subbatch.recording import PassRecorder
from paceline.strategies.subbatch.split import Widths, stages
from paceline.training.loop import Job, Outcome
from paceline.training.loop import train as train_synchronously


def split(
    build: Callable[[], nn.Module], workload: Workload, config: SubBatch, group: Group, seed: int
) -> Parallel:
    """Return this rank's part of the model that `build` makes after `torch.manual_seed(seed)`.

    `workload` describes a rank's largest part of a step. InvalidInput says which layer keeps the
    head from being split.
    """
    head = cut(workload, config.head, config.workers).head
    names = [layer.name for layer in head]
    widths = [Widths.of(num_outputs(layer), config.workers) for layer in head]
    own = [one.columns(group.rank) for one in widths]
    model = narrowed(build, dict(zip(names, own, strict=True)), seed).train().to(group.device)
    parts = apart(model, names, workload.name)
    return Parallel(
        model=model,
        body=parts.body,
        stages=stages(parts.links, widths, group.rank),
        batch_size=workload.batch_size,
        num_passes=len(shares(workload.batch_size, config.workers)),
    )


@dataclass(frozen=True)
class Trained:
    """What came of a run: its outcome, and the bytes that this rank sent in a step, by purpose."""

    outcome: Outcome
    sent_nbytes: dict[str, float]


def train(job: Job, config: SubBatch, parallel: Parallel, seed: int) -> Trained:
    """Train the parts of a model on all ranks of the job's group.

    `job.model` is that of `parallel`, and `job.recorder` a `PassRecorder`. `seed` is that of the
    masks of dropouts. Raises NonFinite, on all ranks, if values that travel are not finite.
    """
    assert isinstance(job.recorder, PassRecorder)
    lane = Lane(job.group)
    replica, gradients = body_of(parallel, config, job.group, lane)
    learner = Learner(
        parallel=parallel,
        replica=replica,
        config=config,
        group=job.group,
        lane=lane,
        recorder=job.recorder,
        sgd=job.sgd,
        seed=seed,
        samples=job.data.test,
    )
    outcome = train_synchronously(job, replica, learner)
    lane.close()  # after an error it may wait for a lost rank, and is left
    sent = gradients.bytes_sent if gradients else 0
    return Trained(outcome, learner.traffic.per_step(sent))


def body_of(
    parallel: Parallel, config: SubBatch, group: Group, lane: Lane
) -> tuple[Replica, LayerGradients | None]:
    """Return the body as one of the group's replicas, and what exchanges its gradients."""
    if group.world_size == 1:
        return Alone(parallel.body), None
    gradients = LayerGradients(lane, group, config.gradients)
    method = Method("subbatch", lambda group, as_views: gradients)
    body = Synchronized(parallel.body, method, group=group, gradient_as_bucket_view=True)
    return body, gradients


def widths_of(parallel: Parallel) -> dict[str, Widths]:
    """Return how the outputs of each layer of the head are shared, by its name."""
    return {stage.name: stage.widths for stage in parallel.stages}


def head_nbytes(parallel: Parallel) -> tuple[int, int]:
    """Return the bytes of the head's parameters: all of them, and those of this rank."""
    whole = own = 0
    for stage in parallel.stages:
        for parameter in stage.parameters:
            own += parameter.nbytes
            whole += parameter.nbytes // stage.columns.width * stage.widths.whole
    return whole, own


def restored(parallel: Parallel) -> Callable[[], None]:
    """Return what makes the model what it is now: its values, and the random numbers to come."""
    tensors = [*parallel.model.parameters(), *parallel.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    generator = torch.get_rng_state()

    @torch.no_grad()
    def restore() -> None:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
            tensor.grad = None
        torch.set_rng_state(generator)

    return restore
