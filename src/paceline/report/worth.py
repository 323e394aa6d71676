"""What a plan says: which way of training, on how many workers, and what limits it."""

from collections.abc import Iterator, Sequence

from paceline.core.insight import Insight
from paceline.report.format import duration, nbytes, number, share
from paceline.result import PlanRow, RankingRows
from paceline.strategies import EXCHANGES

_GOOD, _FAIR = 0.9, 0.7  # of what the devices would reach on their own
_WORTH = 0.03  # of a step: less is not worth a change


def of_plan(ranking: RankingRows) -> Iterator[Insight]:
    """Yield what is to be said of the plans, the most important first."""
    if not ranking.plans:
        sentence = "Nothing can be planned: every strategy was refused, for the reasons below."
        yield Insight("method", sentence, (("refused", str(len(ranking.refused))),))
        return
    best = ranking.plans[0]
    yield _method(ranking.plans, ranking.error_bar)
    yield _limit(best)
    yield _change(ranking, best)
    if ranking.workers_sentence:
        yield _workers(ranking.plans, ranking.workers_sentence)
    name = max(best.memory_nbytes, key=best.memory_nbytes.__getitem__, default=None)
    if name is not None:
        sentence = f"The fullest, {name}, needs {nbytes(best.memory_nbytes[name])} of memory."
        figures = tuple((one, nbytes(count)) for one, count in best.memory_nbytes.items())
        yield Insight("memory", sentence, figures[:4])


def _named(plan: PlanRow) -> str:
    codec = f" with {plan.codec}" if plan.codec else ""
    return f"{plan.strategy}{codec} on {plan.workers} worker{'s' * (plan.workers > 1)}"


def _method(plans: Sequence[PlanRow], error_bar: float) -> Insight:
    best = plans[0]
    sentence = f"{_named(best)} is predicted to be the fastest: {number(best.samples_per_s)}"
    sentence += " samples/s"
    figures = [(_named(best), f"{duration(best.step_s)} a step")]
    other = next((plan for plan in plans if plan.strategy != best.strategy), None)
    if other is not None:
        times = best.samples_per_s / other.samples_per_s
        sentence += f", {times:.2f} times those of {_named(other)}, the best of the others"
        if times <= 1 + error_bar:
            sentence += f"; that is within the {share(error_bar, 0)} that predictions err on"
            sentence += " average: rehearse both"
        figures.append((_named(other), f"{duration(other.step_s)} a step"))
    return Insight("method", f"{sentence}.", tuple(figures))


def _limit(best: PlanRow) -> Insight:
    figures: list[tuple[str, str]] = [("exposed communication", duration(best.exposed_s))]
    reached = ""
    if best.efficiency is not None:
        value = best.efficiency
        verdict = "Good" if value >= _GOOD else "Fair" if value >= _FAIR else "Poor"
        reached = f"{verdict}: it reaches {share(value)} of what its devices would on their own; "
        figures.append(("efficiency", share(value)))
    subject = "it " if reached else "The best plan "
    return Insight("limit", f"{reached}{subject}{best.why}.", tuple(figures))


def _change(ranking: RankingRows, best: PlanRow) -> Insight:
    figures: list[tuple[str, str]] = [
        ("exposed communication", duration(best.exposed_s)),
        ("step", duration(best.step_s)),
    ]
    left_s = best.step_s - best.exposed_s
    advice = ranking.advice
    if advice is not None and advice.pays:
        figures.append(("the link is busy", f"{share(advice.link_busy)} of a plain step"))
        return Insight("change", f"{_capital(advice.sentence)}.", tuple(figures))
    if best.strategy not in EXCHANGES:  # whose devices have no steps in common
        sentence = f"Rehearse {_named(best)} before anything is changed for it"
    elif best.exposed_s > _WORTH * best.step_s and left_s > 0:
        sentence = (
            "Change the exchange first (a faster link, larger batches): without exposed "
            f"communication a step would take {duration(left_s)} instead of "
            f"{duration(best.step_s)}, at best {best.step_s / left_s:.2f} times as fast"
        )
    else:
        sentence = "The exchange hides, or costs nothing: only faster devices would make it faster"
    if advice is not None:
        sentence += f". As to codecs, {advice.sentence}"
    return Insight("change", f"{sentence}.", tuple(figures))


def _workers(plans: Sequence[PlanRow], sentence: str) -> Insight:
    best: dict[int, float] = {}
    for plan in plans:
        best[plan.workers] = max(best.get(plan.workers, 0.0), plan.samples_per_s)
    figures = tuple(
        (f"{workers} worker{'s' * (workers > 1)}", f"{number(rate)} samples/s")
        for workers, rate in sorted(best.items())
    )
    return Insight("workers", f"{_capital(sentence)}.", figures[:8])


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
