"""Rank on this machine what whole replicas would take, and what a split head would."""

from collections.abc import Callable, Sequence

from paceline import subbatch_run
from paceline.core.errors import InvalidInput
from paceline.planner import Forecast, Ranking, Refusal, rank
from paceline.runs import Setup

_SPLIT = "subbatch"


def ranking_here(
    setup: Setup, forecasts: Sequence[Forecast], say: Callable[[str], None]
) -> Ranking:
    """Return the forecasts and that of strategy subbatch, best first, or why it is refused.

    Its parts of a step are not those of a whole model, and are measured by themselves, of a model
    of its own. All ranks must call it together; `say` is told that it takes time.
    """
    settings = setup.settings.model_copy(update={"strategy": _SPLIT, "options": {}})
    found: list[Forecast] = []
    refused: tuple[Refusal, ...] = ()
    try:
        split = subbatch_run.build(settings, setup.group)
        say(f"{_SPLIT}: profiling for {settings.profile_s:g} s")
        found = subbatch_run.plan_here(split, subbatch_run.profile_here(split))
    except InvalidInput as error:
        refused = (Refusal(_SPLIT, settings.workers, forecasts[0].placement, str(error)),)
    return Ranking(tuple(rank([*forecasts, *found])), refused, settings.batch_size)
