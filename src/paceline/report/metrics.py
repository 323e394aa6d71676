"""Compute metrics of runs, profiles, plans and studies, from which `advice` derives findings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import get_args

from paceline.core.compare import Breakdown, breakdown_by_device
from paceline.core.outcome import Epoch, is_share
from paceline.core.timeline import Timeline
from paceline.planner.admission import GAIN
from paceline.records.profile import ProfileResult
from paceline.records.result import PlanRow, RankingRows, RunResult
from paceline.records.scale import ScaleCell, Scaling, TimedCell, most_real, timed, unrest_of
from paceline.report.advice import Metrics
from paceline.report.format import counted, number, ratio, share
from paceline.report.tables import plan_name
from paceline.strategies import EXCHANGES, STRATEGIES

_SCALINGS = get_args(Scaling)


def of_run(result: RunResult, timeline: Timeline | None) -> Metrics:
    """Compute the metrics of a run or rehearsal; `timeline` contains the traced steps."""
    found, error = Metrics(), result.prediction_error
    if result.predicted_samples_per_s is not None and result.samples_per_s:
        error = result.predicted_samples_per_s / result.samples_per_s - 1
    if error is not None:
        found.values["prediction_error"] = abs(error)
    if result.comparison is None:
        _of_asynchronous(result, found)
    else:
        _of_step(result, found)
        if result.shares is None and timeline is not None:
            _of_balance(timeline, found)
    if not result.is_rehearsal:
        _of_epochs(result.epochs, result.score, found)
        _of_memory(result, found)
    return found


def parts_of(result: RunResult) -> Breakdown | None:
    """Return the seconds of each part of a typical traced step; None for asynchronous workers."""
    if result.comparison is None:
        return None
    seconds = {f"{row.quantity}_s": row.right_s for row in result.comparison.rows}
    parts = Breakdown(**{one.name: seconds.get(one.name, 0.0) for one in fields(Breakdown)})
    return parts if parts.step_s > 0 else None


def speedup(result: RunResult) -> float | None:
    """Estimate the workers' speed-up over one worker that computes the whole batch.

    Returns None for asynchronous workers, unequal shares of a batch, and a single worker. Also
    returns None if workers share cores, because one worker alone would then compute faster.
    """
    parts = parts_of(result)
    if parts is None or result.shares is not None or result.num_workers == 1:
        return None
    if _share_cores(result, result.num_workers):
        return None
    alone_s = result.num_workers * (parts.load_s + parts.passes_s) + parts.update_s
    return alone_s / parts.step_s


def _share_cores(result: RunResult, num_workers: int) -> bool:
    """Return whether `num_workers` CPU workers would share cores on the run's hosts."""
    if result.is_rehearsal or result.machine.get("device") != "cpu":
        return False
    return num_workers > int(result.machine.get("hosts", 1))


def _of_step(result: RunResult, found: Metrics) -> None:
    parts = parts_of(result)
    if parts is None:
        return
    whole, workers = parts.step_s, result.num_workers
    size = result.settings.batch_size
    found.values |= {
        "exposed": parts.exposed_s / whole,
        "idle": parts.idle_s / whole,
        "loading": parts.load_s / whole,
        "updating": parts.update_s / whole,
        "computing": parts.passes_s / whole,
    }
    found.words |= {"workers": str(workers), "twice_batch": str(2 * size)}
    takes_codec = "codec" in result.config and result.config["codec"] is None
    larger = f"--batch-size {2 * size}"
    found.words["exchange_less"] = f"--codec dynamic8, or {larger}" if takes_codec else larger
    if (times := speedup(result)) is not None:
        found.values["alone_saves"] = 1 - times
        found.words["speedup"] = number(times)
    if result.shares is None and not _share_cores(result, workers + 1):
        divides = (parts.load_s + parts.passes_s) / whole
        found.values["further_worker_saves"] = divides / (workers + 1)
        was_declined = workers == 1 and result.decisions
        if workers < result.machine.get("cores", workers + 1) and not was_declined:
            found.words["more_workers"] = str(workers + 1)
    _of_other_plans(result, found)


def _of_other_plans(result: RunResult, found: Metrics) -> None:
    """Add to `found` the fraction of a step that another strategy is predicted to save.

    Only the fastest other strategy is considered, and only if the predicted range of its step time
    is entirely below the range of the run's strategy.
    """
    own, plans = result.predicted_range_s, () if result.is_rehearsal else result.plans
    same = [one for one in plans if one.workers == result.num_workers]
    others = [one for one in same if one.strategy != result.strategy and one.is_same_training]
    other = min(others, key=lambda plan: plan.step_s, default=None)
    if other is not None and own is not None and other.range_s[1] < own[0]:
        assert result.predicted_step_s is not None
        found.values["other_saves"] = 1 - other.step_s / result.predicted_step_s
        found.words["other"] = other.strategy


def _of_balance(timeline: Timeline, found: Metrics) -> None:
    computing = [part.passes_s for part in breakdown_by_device(timeline).values()]
    if total := sum(computing):
        slowest = max(computing) * len(computing) / total
        found.values["unevenness"] = 1 - 1 / slowest
        found.words["slowest"] = number(slowest)


def _of_memory(result: RunResult, found: Metrics) -> None:
    whole, peaks = result.machine.get("memory_bytes"), result.peak_memory_bytes
    if isinstance(whole, int | float) and whole and peaks:
        found.values["memory_used"] = sum(peaks) / whole
        found.words["holder"] = f"{counted(len(peaks), 'worker')} together"


def _of_epochs(epochs: Sequence[Epoch], score: str, found: Metrics) -> None:
    """Add metrics to `found` that show whether more or fewer epochs would be better."""
    losses = [epoch.test_loss for epoch in epochs if epoch.test_loss is not None]
    if len(epochs) < 2 or len(losses) < len(epochs):
        return
    lowest = min(losses)
    best = losses.index(lowest)
    found.words |= {"epochs": str(len(epochs)), "twice_epochs": str(2 * len(epochs))}
    found.words["best_epoch"] = str(best + 1)
    changes = _change(losses), _change([epoch.train_loss for epoch in epochs])
    if None not in changes:
        found.values["loss_unchanged"] = 1 - max(one for one in changes if one is not None)
    if best == len(losses) - 1:
        found.values["loss_fell"] = 1 - losses[-1] / losses[-2] if losses[-2] else 0.0
        return
    scores = [epoch.score or 0.0 for epoch in epochs]
    still_rose = is_share(score) and scores.index(max(scores)) > best
    if lowest and not still_rose:
        found.values["loss_risen"] = losses[-1] / lowest - 1


def _change(losses: Sequence[float]) -> float | None:
    """Return the largest relative change from the first loss; None if the first loss is zero."""
    first = losses[0]
    return max(abs(loss / first - 1) for loss in losses) if first > 0 else None


def _of_asynchronous(result: RunResult, found: Metrics) -> None:
    tried = [row.tried_samples_per_s for row in result.workers]
    alone = sum(speed for speed in tried if speed is not None)
    if alone and None not in tried:
        found.values["gained_together"] = result.samples_per_s / alone - 1
        found.values["lost_together"] = 1 - result.samples_per_s / alone
    if result.utilisation:
        device, busy = min(result.utilisation.items(), key=itemgetter(1))
        found.values["idle_device"] = 1 - busy
        found.words["device"] = device
        if options := _one_more_each(result):
            found.words["more_lanes"] = options
    travelling = [row for row in result.traffic if row.travels and row.nbytes]
    if travelling:
        most = max(travelling, key=lambda row: row.nbytes)
        found.values["sent_as_is"] = ratio(most.nbytes, sum(row.nbytes for row in travelling))
        # `config[purpose]` is None without a codec; purposes that support no codec are missing.
        if most.purpose in result.config and result.config[most.purpose] is None:
            found.words["purpose"] = most.purpose


def _one_more_each(result: RunResult) -> str | None:
    """Return the command-line options that add one worker to each device; None if impossible.

    The options set --workers and `lanes`, the number of workers on a device. More lanes alone would
    put the same number of workers on fewer devices.
    """
    lanes, staleness = result.config.get("lanes"), result.config.get("staleness")
    if not isinstance(lanes, int) or staleness == 0:  # staleness 0 requires lanes=1
        return None
    workers = (lanes + 1) * len(result.utilisation)
    if workers > result.settings.batch_size:
        return None
    return f"--workers {workers} --strategy-option lanes={lanes + 1}"


def of_profile(result: ProfileResult) -> Metrics:
    """Compute the metrics of a profile.

    The metric "calls" is the fraction of a step in which forward and backward run no operator (on a
    GPU: no kernel); "computing" is the rest of forward and backward.
    """
    whole = result.stages_s or 1.0
    seconds: dict[str, float] = {row.stage: row.seconds for row in result.stages}
    calls = _calls(result, seconds, whole)
    memory = result.memory
    copies = memory.parameters + memory.gradients + memory.momentum
    slowest = max(result.layers, key=lambda row: row.median_s)
    size = result.settings.batch_size
    return Metrics(
        {
            "unrest": result.unrest,
            "exposed": seconds["exposed"] / whole,
            "idle": seconds["idle"] / whole,
            "loading": seconds["load"] / whole,
            "updating": seconds["update"] / whole,
            "calls": calls,
            "computing": (seconds["forward"] + seconds["backward"]) / whole - calls,
            "slowest_layer": slowest.median_s / whole,
            "feature_maps": ratio(memory.features, memory.features + copies),
        },
        {
            "timed": "steps",
            "twice_batch": str(2 * size),
            "exchange_less": f"another --strategy, a --codec or --batch-size {2 * size}",
            "layer": slowest.name,
        },
    )


def _calls(result: ProfileResult, seconds: Mapping[str, float], whole: float) -> float:
    """Return the fraction of a step in which the passes run no operator (GPU: kernel).

    The passes are forward and backward. `seconds`: duration of each part of the step. `whole`:
    duration of the step in seconds.
    """
    computing = (seconds["forward"] + seconds["backward"]) / whole
    if result.kernels_s is None:
        passes = [row for row in result.agreement if row.phase in ("forward", "backward")]
        between = sum(row.torch_s - row.in_operators_s for row in passes)
        return computing * between / (sum(row.torch_s for row in passes) or 1.0)
    # `kernels_s` also includes the kernels of loading and update: add these parts to `busy`.
    busy = computing + (seconds["load"] + seconds["update"]) / whole
    return min(computing, max(0.0, busy - result.kernels_s / whole))


def of_ranking(ranking: RankingRows, *, is_measured: bool) -> Metrics:
    """Compute the metrics of the recommended plan relative to the other plans.

    `is_measured`: whether device speeds were measured rather than taken from a machine file.
    """
    found = Metrics({"stated": 0.0 if is_measured else 1.0})
    if (best := ranking.recommended) is None:
        return found
    found.values["exposed"] = best.exposed_s / best.step_s
    found.words |= {"best": named(best), "exchange_less": "a faster link, or larger batches"}
    alike = [one for one in ranking.plans if one.is_same_training == best.is_same_training]
    other = next((one for one in alike if one.strategy != best.strategy), None)
    if other is not None:
        found.values["ranges_overlap"] = (best.range_s[1] - other.range_s[0]) / best.step_s
        known = [STRATEGIES.get(one.strategy) for one in (best, other)]
        both = all(one is not None and one.is_rehearsed for one in known)
        found.words["other"] = named(other)
        verb = "paceline rehearse" if both else "paceline train"
        found.words["try_both"] = f"Try {verb} with both"
    by_workers: dict[int, PlanRow] = {}
    for plan in alike:
        by_workers.setdefault(plan.workers, plan)
    of_rates({n: plan.samples_per_s for n, plan in by_workers.items()}, found)
    _of_other_training(ranking, best, found)
    exchanges = [one for one in ranking.plans if one.strategy in EXCHANGES]
    plain = next((one for one in exchanges if one.codec is None), None)
    if plain is not None and best.codec is not None and best.strategy in EXCHANGES:
        found.values["codec_saves"] = 1 - best.step_s / plain.step_s
        found.words["codec"] = best.codec
    return found


def _of_other_training(ranking: RankingRows, best: PlanRow, found: Metrics) -> None:
    """Add to `found` by what fraction another training method shortens the time to a loss.

    `best`, the recommended plan, is compared with the fastest plan that learns differently, for
    example with strategy local, and whose number of steps to a loss is known.
    """

    def rate(plan: PlanRow) -> float:
        return plan.samples_per_s / plan.steps_to_loss.median if plan.steps_to_loss else 0.0

    others = [plan for plan in ranking.plans if plan.steps_to_loss is not None]
    if best.is_same_training and others:
        other = max(others, key=rate)
        assert other.steps_to_loss is not None
        found.values["other_training_saves"] = 1 - best.samples_per_s / rate(other)
        found.words |= {"learns": named(other), "measured_on": other.steps_to_loss.measured_on}


def of_rates(rates: Mapping[int, float], found: Metrics) -> None:
    """Add to `found` the fraction of workers whose removal would hardly slow down training.

    `rates`: best throughput for each number of workers.
    """
    if len(rates) < 2:
        return
    most, top = max(rates), max(rates.values())
    worth = min(n for n, rate in rates.items() if rate * GAIN >= top)
    found.values["needless_workers"] = 1 - worth / most
    change = rates[most] / rates[worth] - 1
    slower = f"{share(abs(change), 0)} {'faster' if change > 0 else 'slower'}"
    found.words |= {"worth": str(worth), "most": str(most), "effect": slower}


def named(plan: PlanRow) -> str:
    """Return a plan's name, such as "allreduce + dynamic8 on 4 workers"."""
    return f"{plan_name(plan)} on {counted(plan.workers, 'worker')}"


def of_study(cells: Sequence[ScaleCell]) -> Metrics:
    """Compute the metrics of a scaling study, mainly from its fastest cell.

    A cell is an epoch with one strategy, number of workers and batch size. Only `comparable` cells
    are considered.
    """
    found = Metrics({"unrest": unrest_of(cells)}, {"timed": "repetitions"})
    known = comparable(cells)
    if not known:
        return found
    first = max(known, key=lambda one: one.rate)
    exposed, idle = first.exposed_s / first.epoch_s, first.idle_s / first.epoch_s
    found.values |= {"exposed": exposed, "idle": idle, "computing": max(0.0, 1 - exposed - idle)}
    found.words["exchange_less"] = f"a codec, a faster link or --batch-size {2 * first.batch}"
    if first.capacity_bytes:
        found.values["memory_used"] = first.memory_bytes / first.capacity_bytes
        found.words["holder"] = "a worker"
    same_batch = [one for one in known if one.batch == first.batch]
    _of_methods(same_batch, first, found)
    slowest_first = sorted(same_batch, key=attrgetter("rate"))
    of_rates({one.workers: one.rate for one in slowest_first}, found)
    return found


def comparable(cells: Iterable[ScaleCell]) -> list[TimedCell]:
    """Return those cells of a scaling study that can be compared: of one kind and one scaling.

    Measured cells are preferred to rehearsed ones, and these to predicted ones. If they have
    several scalings, only those with the scaling that comes first in `Scaling` are returned.
    """
    known = most_real(timed(cells))
    first = min((_SCALINGS.index(one.scaling) for one in known), default=0)
    return [one for one in known if one.scaling == _SCALINGS[first]]


def _of_methods(cells: Sequence[TimedCell], first: TimedCell, found: Metrics) -> None:
    """Add to `found` by what fraction the fastest strategy's epoch is shorter than the second's.

    Adds nothing if the ranges of the two strategies' epoch times overlap. `first`: the fastest of
    all `cells`.
    """
    workers = max(one.workers for one in cells) if first.workers == 1 else first.workers
    compared = sorted((one for one in cells if one.workers == workers), key=lambda one: one.epoch_s)
    if workers > 1 and len(compared) > 1 and compared[0].differs_from(compared[1]):
        best, second = compared[:2]
        found.values["best_saves"] = 1 - best.epoch_s / second.epoch_s
        each = "" if best.scaling == "strong" else " each"
        where = f"on {counted(workers, 'worker')} with a batch of {best.batch}{each}"
        found.words |= {"best": best.method, "second": second.method, "where": where}
