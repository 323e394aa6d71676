"""Work that the host's exchange leaves after backward (Le et al. 2018, definitions 3.2 and 3.3)."""

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.durations import duration
from paceline.core.plan import Kind, TaskId


def after_backward(phase: BackwardPhase) -> AfterBackward:
    """Return T = max T_BP^i of a simulated step, with the chunk i that decides it."""
    hidden, whole = duration(phase.hidden_s), duration(phase.exchange_s)
    layer, result = _last_result(phase)
    done = phase.spans[result].end_s - phase.start_s
    ready = phase.spans[layer].end_s - phase.start_s
    because = (
        f"{hidden} of the {whole} of copies and sums run beside backward, and {layer.part}, whose "
        f"gradients arrive last, is computed after {duration(ready)} and summed after "
        f"{duration(done)}"
    )
    if phase.sync_s:
        because += f" (synchronising takes {duration(phase.sync_s)})"
    return phase.explained(because)


def _last_result(phase: BackwardPhase) -> tuple[TaskId, TaskId]:
    """Return the backward of the layer whose gradients arrive last, and the task that brings them.

    A weight update waits for the results of all chunks in their order, and then for backward.
    """
    results = phase.last_update.after[:-1]
    chunk = max(range(len(results)), key=lambda i: phase.spans[results[i]].end_s)
    copied = TaskId(0, Kind.D2H, str(chunk), phase.last_update.worker)
    (layer,) = phase.tasks[copied].after
    return layer, results[chunk]
