"""What came of a run of strategy wheel, and the plan of the steps that it has traced."""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from paceline.core.compare import conform
from paceline.core.strategy import Window
from paceline.core.timeline import Timeline
from paceline.strategies.wheel.branch import Branch
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.fit import device_name, devices_of
from paceline.strategies.wheel.gathered import Between, Crossed
from paceline.strategies.wheel.heads import HeadWorkers
from paceline.strategies.wheel.hub import Hub
from paceline.strategies.wheel.order import Fitted, Run
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.server import ParameterServer, ServerStatistics
from paceline.strategies.wheel.split import Purpose, Split, messages
from paceline.strategies.wheel.tally import Tally
from paceline.strategies.wheel.timeline import timeline_of

_SLACK_S = 1e-3  # a hook of the last layer runs a moment after the layer


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    `nbytes` are those of each purpose, as they were counted; `formula_nbytes` are the plan's for
    all steps. `between` are those of what child hubs exchange with this one, by purpose, and the
    formula's; `to_parent` is the same of a child hub, which made `num_pushed` updates of its
    parent. `wire_nbytes` are all that the hub sent and received, with headers. `fitted` is the
    machine and its prices, None if it was not profiled. `bodies` are the devices of the workers, by
    their numbers; `traced` holds some of their steps, and `faults` where they depart from the plan.
    """

    tally: Tally
    updates: ServerStatistics
    trained_s: float
    nbytes: Mapping[Purpose, int]
    formula_nbytes: Mapping[Purpose, int]
    between: Mapping[str, tuple[int, int]]
    wire_nbytes: tuple[int, int]
    config: Wheel
    fitted: Fitted | None
    bodies: Mapping[int, str]
    traced: Timeline
    faults: tuple[str, ...]
    to_parent: Mapping[str, tuple[int, int]]
    num_pushed: int

    def statistics(self) -> dict[str, int]:
        """Return the bytes that were communicated, by the seven purposes of figure 2."""
        return {purpose.value: nbytes for purpose, nbytes in self.nbytes.items()}


def outcome_of(
    run: Run,
    parts: Split,
    hub: Hub,
    server: ParameterServer,
    heads: HeadWorkers,
    fitted: Fitted | None,
    num_traced: int,
    wire_nbytes: tuple[int, int],
) -> Outcome:
    """Bring together what a run has left behind."""
    halves_nbytes = parts.body.gradient_nbytes, parts.head.gradient_nbytes
    crossed = server.crossed if isinstance(server, Branch) else Crossed()
    bodies = _bodies(run.config, fitted)
    traced = timeline_of(hub.record, bodies, messages(parts, run.config))
    is_whole = not hub.tally.lost and not run.resume and num_traced > 0
    faults: tuple[str, ...] = ()
    if fitted is not None and is_whole:
        planned = plan(run.workload, fitted[0], run.config, Window(num_traced))
        faults = tuple(conform(planned, traced, _SLACK_S))
    return Outcome(
        tally=hub.tally,
        updates=server.statistics,
        trained_s=hub.trained_s,
        nbytes={purpose: heads.nbytes[purpose] for purpose in Purpose},
        formula_nbytes=formula_nbytes(run, parts, hub.trunk.workers),
        between=hub.trunk.crossed.beside_formula(*halves_nbytes),
        wire_nbytes=wire_nbytes,
        config=run.config,
        fitted=fitted,
        bodies=bodies,
        traced=traced,
        faults=faults,
        to_parent=crossed.beside_formula(*halves_nbytes),
        num_pushed=crossed.times[Between.BODY_GRADIENTS],
    )


def _bodies(config: Wheel, fitted: Fitted | None) -> dict[int, str]:
    """Return the name of each worker's device."""
    names: dict[int, str] = {}
    for number, workers in devices_of(config).items():
        name = device_name("cpu", number) if fitted is None else fitted[0].devices[number].name
        names |= dict.fromkeys(workers, name)
    return names


def formula_nbytes(run: Run, parts: Split, hubs: Container[int] = ()) -> dict[Purpose, int]:
    """Return what the plan says that all steps of a run communicate: Table 1's formula.

    `hubs` are workers that are child hubs: what they communicate is not in it.
    """
    sizes: Counter[int] = Counter()
    for worker in range(run.config.workers):
        if worker not in hubs:
            sizes.update(map(len, run.batches_of(worker)))
    total: Counter[Purpose] = Counter(dict.fromkeys(Purpose, 0))
    for size, times in sizes.items():
        for purpose, message in messages(_with_samples(parts, size), run.config).items():
            total[purpose] += run.epochs * times * message.nbytes
    return dict(total)


def _with_samples(parts: Split, samples: int) -> Split:
    """Return the halves of a batch of another size, as far as messages depend on it."""
    crossing = parts.crossing_nbytes // parts.head.batch_size * samples
    return Split(
        replace(parts.body, batch_size=samples),
        replace(parts.head, batch_size=samples, input_nbytes=crossing),
    )
