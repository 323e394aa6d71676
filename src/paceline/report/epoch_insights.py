"""Advice about the number of epochs, from the losses after each."""

from collections.abc import Iterator, Sequence

from paceline.core.outcome import Epoch, Insight, is_share
from paceline.report.format import loss_text, score_text, share

_HARDLY = 0.01  # of the loss


def of_epochs(epochs: Sequence[Epoch], score: str) -> Iterator[Insight]:
    """Yield advice about the number of epochs, if two or more were tested; `score` is its name."""
    losses = [epoch.test_loss for epoch in epochs if epoch.test_loss is not None]
    if len(epochs) < 2 or len(losses) < len(epochs):
        return
    last, best = epochs[-1], epochs[losses.index(min(losses))]
    scores = [epoch.score or 0.0 for epoch in epochs]
    highest = epochs[scores.index(max(scores))]
    since = f"The test loss was lowest after epoch {best.number + 1} of {len(epochs)}"
    fell = 1 - losses[-1] / losses[-2] if losses[-2] else 0.0
    if _stands_still(losses) and _stands_still([epoch.train_loss for epoch in epochs]):
        sentence = (
            f"Neither loss has changed in {len(epochs)} epochs: the model has not learnt. Try "
            "another learning rate, or more epochs."
        )
        code = "not_learnt"
    elif best is last and fell > _HARDLY:
        fallen = f"The test loss still fell by {share(fell)} in the last epoch"
        sentence, code = f"{fallen}: train for more epochs.", "more"
    elif best is last:
        fallen = f"The test loss fell by only {share(fell)} in the last epoch"
        sentence = f"{fallen}: more epochs with this learning rate would hardly help."
        code = "hardly_more"
    elif not min(losses) or losses[-1] <= (1 + _HARDLY) * min(losses):
        sentence = f"{since}, and has hardly changed since: fewer epochs would do."
        code = "fewer_do"
    else:
        sentence = f"{since}, and is {share(losses[-1] / min(losses) - 1)} higher now"
        if is_share(score) and highest.number > best.number:
            sentence += f"; but the {score} was best after epoch {highest.number + 1}."
            code = "score_still_rose"
        else:
            sentence += ": train for fewer epochs, or with a smaller learning rate."
            code = "fewer"
    figures = (
        ("last test loss", loss_text(last.test_loss)),
        ("lowest", f"{loss_text(best.test_loss)} after epoch {best.number + 1}"),
        *(((f"last {score}", score_text(score, last.score)),) if last.score is not None else ()),
    )
    yield Insight("change", sentence, figures, f"epochs.{code}")


def _stands_still(losses: Sequence[float]) -> bool:
    """Whether a loss is nowhere far from where it began, and not near zero."""
    first = losses[0]
    return first > 0 and all(abs(loss / first - 1) <= _HARDLY for loss in losses)
