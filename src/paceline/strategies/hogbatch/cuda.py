"""A worker on a GPU: a deep replica, whose update is pushed into the shared model (section VI-B).

One stream carries batch and model to the device, the default stream computes, and a third carries
the update back, which the host then adds to the model as it is by then: other workers have changed
it meanwhile, and nobody waits for anybody. Host memory is pinned, so that copies are the device's.
"""

import time
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.cost import compute_lane, d2h_lane, exchange_lane, h2d_lane, reduce_lane
from paceline.core.plan import Kind, Resource, task_name
from paceline.core.timeline import Span
from paceline.models.layers import layers_of
from paceline.record.clock import CudaClock
from paceline.record.marks import LayerMarks, Phase, layer_spans
from paceline.strategies.hogbatch.fit import HOST
from paceline.strategies.hogbatch.optimizers import Make
from paceline.strategies.hogbatch.replica import Done, Samples, tensors_of
from paceline.strategies.hogbatch.work import MODEL
from paceline.training.objective import objective_for

_NS = 1e-9
_ORDER = ("start", "batch", "model", "forward", "backward", "step", "update")


class CudaReplica:
    """A copy of the shared model on a GPU."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shared: Mapping[str, Tensor],
        make: Make,
        samples: Samples,
        worker: int,
        device: torch.device,
    ) -> None:
        self._device, self._worker, self._samples = device, worker, samples
        self._loss = objective_for(samples.targets).loss
        self._model = build().to(device).train()
        self._optimizer = make([p for p in self._model.parameters() if p.requires_grad])
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        own = tensors_of(self._model)
        # What is no number is no sum of updates either, and stays as it was built.
        names = [name for name, tensor in own.items() if tensor.dtype != torch.bool]
        self._pairs = [(own[name], shared[name]) for name in names]
        self._before = [torch.empty_like(tensor) for tensor, _ in self._pairs]
        self._updates = [torch.empty_like(t, device="cpu").pin_memory() for t, _ in self._pairs]
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._clock = CudaClock()
        self._marks = LayerMarks(layers_of(self._model), self._clock)
        self.spans: list[Span] = []

    def train(self, rows: Tensor, rate: float, step: int | None) -> Done:
        """See `Replica`: copy in, compute, and add to the shared model what has changed."""
        self._marks.watch(step is not None)
        marks: dict[str, Any] = {}
        inputs, targets = self._copy_in(rows, marks)
        loss = self._loss(self._model(inputs), targets)
        marks["forward"] = self._clock.mark()
        loss.backward()
        marks["backward"] = self._clock.mark()
        self._step(rate)
        marks["step"] = self._clock.mark()
        self._copy_out(marks)
        value = float(loss.detach())
        if isfinite(value):
            self._push()
        ended_s = time.monotonic_ns() * _NS
        times = dict(zip(_ORDER, self._clock.seconds([marks[key] for key in _ORDER]), strict=True))
        times["end"] = max(ended_s, times["update"])
        if step is not None:
            self._trace(step, len(rows), times)
        moments = (times[key] for key in ("start", "model", "forward", "backward", "step", "end"))
        return Done(1, value * len(rows), *(round(moment / _NS) for moment in moments))

    def _copy_in(self, rows: Tensor, marks: dict[str, Any]) -> tuple[Tensor, Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._in.wait_stream(current)
        with torch.cuda.stream(self._in), torch.no_grad():
            marks["start"] = self._clock.mark()
            inputs, targets = (
                part.pin_memory().to(self._device, non_blocking=True)
                for part in self._samples.of(rows)
            )
            marks["batch"] = self._clock.mark()
            for (tensor, shared), before in zip(self._pairs, self._before, strict=True):
                tensor.copy_(shared, non_blocking=True)
                before.copy_(tensor)
            marks["model"] = self._clock.mark()
        current.wait_stream(self._in)
        inputs.record_stream(current)
        targets.record_stream(current)
        return inputs, targets

    def _step(self, rate: float) -> None:
        for group, own in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = own * rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def _copy_out(self, marks: dict[str, Any]) -> None:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for (tensor, _), before, update in zip(
                self._pairs, self._before, self._updates, strict=True
            ):
                update.copy_(torch.sub(tensor, before, out=before), non_blocking=True)
            marks["update"] = self._clock.mark()
        self._out.synchronize()

    @torch.no_grad()
    def _push(self) -> None:
        for (_, shared), update in zip(self._pairs, self._updates, strict=True):
            shared.add_(update)

    def _trace(self, step: int, size: int, times: Mapping[str, float]) -> None:
        worker, device = self._worker, f"gpu{self._worker}"
        lane, to_device = compute_lane(device), h2d_lane(device)
        borders = self._marks.seconds()
        start_s, forward_s, backward_s = times["model"], times["forward"], times["backward"]
        phases = (
            Phase(Kind.FORWARD, start_s, forward_s, forward_s, borders[0]),
            Phase(Kind.BACKWARD, forward_s, backward_s, backward_s, borders[1]),
        )

        def span(kind: Kind, label: str, part: str, on: tuple[Resource, ...], keys: str) -> Span:
            name = task_name(step, kind, label, worker)
            start, end = keys.split()
            return Span(name, kind, on, times[start], times[end], part)

        self.spans += [
            span(Kind.H2D, "batch", f"batch:{size}", (to_device,), "start batch"),
            span(Kind.H2D, MODEL, MODEL, (to_device,), "batch model"),
            *layer_spans(step, worker, lane, self._marks.names, phases),
            span(Kind.STEP, "", str(size), (lane,), "backward step"),
            span(Kind.D2H, "update", "update", (d2h_lane(device),), "step update"),
            span(
                Kind.REDUCE,
                "update",
                "update",
                (exchange_lane(device), reduce_lane(HOST)),
                "update end",
            ),
        ]
