"""Two workers of which one is slower: updates and busy time under the adaptive policy."""

from typing import Any

from cases import settings

from paceline.core.timeline import Timeline
from paceline.strategies.hogbatch import statistics
from paceline.strategies.hogbatch.run import train
from paceline.uneven import build, predict

RATIOS = {4: 64, 16: 512, 236: 8192}  # slower by, and the upper threshold of a batch


def measure(quick: bool) -> dict[str, Any]:
    """Return for each ratio what each worker did in the second half of the run."""
    ratios = {4: RATIOS[4]} if quick else RATIOS
    return {f"{ratio}:1": _of(ratio, most, quick) for ratio, most in ratios.items()}


def _of(ratio: int, most: int, quick: bool) -> dict[str, Any]:
    wanted = settings(
        quick,
        workers=f"cpu:1,cpu:1@slow={ratio}",
        options={"policy": "adaptive", "cpu_batch": [1, most]},
        epochs=2 if quick else 4,
    )
    run = build(wanted)
    outcome = train(run)
    planned = predict(run, outcome)
    whole = outcome.history.timeline(outcome.names)
    after_s = whole.start_s + whole.makespan_s / 2
    late = Timeline([span for span in whole.spans if span.start_s >= after_s], "measured")
    updates = statistics.num_updates(late)
    made = [updates.get(name, 0.0) for name in outcome.names]
    slower, all_made = outcome.names[1], outcome.history.updates(outcome.names)
    return {
        "share_of_slower": all_made[slower] / sum(all_made.values()),
        "planned_share": planned.shares[slower] if planned else None,
        "most": most,
        "updates": updates,
        "factor": max(made) / min(made) if min(made) else None,
        "busy": statistics.utilisation(late),
        "samples_per_s": sum(statistics.num_samples(whole).values()) / outcome.trained_s,
    }
