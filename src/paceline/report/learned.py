"""What the epochs of a run say: whether more of them, or fewer, would be better."""

from collections.abc import Iterator, Sequence

from paceline.core.insight import Insight
from paceline.report.format import share
from paceline.result import EpochRow

_HARDLY = 0.01  # of the loss


def of_epochs(epochs: Sequence[EpochRow], score: str) -> Iterator[Insight]:
    """Yield what to change in the number of epochs, if there are two or more.

    `score` is what the accuracy is called.
    """
    if len(epochs) < 2:
        return
    last, before = epochs[-1], epochs[-2]
    best = min(epochs, key=lambda epoch: epoch.test_loss)
    figures = [
        ("last test loss", f"{last.test_loss:.4f}"),
        ("lowest", f"{best.test_loss:.4f} after epoch {best.number + 1}"),
        (f"last {score}", share(last.accuracy, 2)),
    ]
    if best is not last:
        sentence = _past_the_best(epochs, best, score)
    else:
        fell = 1 - last.test_loss / before.test_loss if before.test_loss else 0.0
        sentence = (
            f"The test loss still fell by {share(fell)} in the last epoch: train for more epochs."
            if fell > _HARDLY
            else f"The test loss fell by only {share(fell)} in the last epoch: more epochs with "
            "this learning rate would hardly help."
        )
    yield Insight("change", sentence, tuple(figures))


def _past_the_best(epochs: Sequence[EpochRow], best: EpochRow, score: str) -> str:
    last, highest = epochs[-1], max(epochs, key=lambda epoch: epoch.accuracy)
    since = f"The test loss was lowest after epoch {best.number + 1} of {len(epochs)}"
    if not best.test_loss or last.test_loss <= (1 + _HARDLY) * best.test_loss:
        return f"{since}, and has hardly changed since: fewer epochs would do."
    risen = f"{since}, and is {share(last.test_loss / best.test_loss - 1)} higher now"
    if highest.number > best.number:
        return f"{risen}; but the {score} was best after epoch {highest.number + 1}."
    return f"{risen}: train for fewer epochs, or with a smaller learning rate."
