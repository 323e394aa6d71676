"""Runs of strategy hogbatch on a model that counts how often each sample was used in an update.

    python uneven.py CASE/POLICY/WORKERS/EPOCHS...

Each run prints a line. Workers import this file for its optimizer.
"""

import gc
import json
import sys
from pathlib import Path

from counted import Counted, Silent, count, num_memories, prepare, recipe, session_of

BATCH_SIZE = 32
STOPPED_S = 3.0  # after which a worker that does not answer is given up


class Count:
    """Adds one to the rows that have a gradient, and touches no other.

    Not one of torch's, whose first takes each worker a second and a half to import a compiler.
    """

    def __init__(self, parameters, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    def step(self) -> None:
        count(self.param_groups[0]["params"])

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def ran(case: str, policy: str, workers: str, epochs: int) -> dict:
    """Train, and return what came of it."""
    from paceline.core.errors import PacelineError
    from paceline.strategies.hogbatch.run import runner_of

    if case in ("kill", "nan", "stop"):
        Path(case).touch()
    model = Counted()
    session = session_of(
        workers,
        Silent(),
        {"policy": policy},
        model="counted:Counted",
        optimizer="uneven:Count",
        batch_size=BATCH_SIZE,
        epochs=epochs,
        deadline_s=STOPPED_S if case == "stop" else 30.0,
    )
    try:
        with runner_of(session, recipe(), model) as runner:
            runner.measure()
            for _ in runner.epochs():
                pass
            outcome = runner.outcome()
            log = list(runner.coordinator.history.log)
    except PacelineError as error:
        hit = [int(path.suffix[1:]) for path in Path().glob(f"{case}.*")]
        return {"error": f"{type(error).__name__}: {error}", "hit": hit}
    return {
        "uses": model.uses[:, 0].tolist(),
        "lost": outcome.lost,
        "faults": outcome.faults,
        "samples": sum(batch.size for batch in log),
    }


def main() -> None:
    prepare(__file__)
    for asked in sys.argv[1:]:
        case, policy, workers, epochs = asked.split("/")
        before = num_memories()
        found = ran(case, policy, workers, int(epochs))
        gc.collect()
        found["left"] = num_memories() - before
        print(json.dumps([asked, found]), flush=True)


if __name__ == "__main__":
    main()
