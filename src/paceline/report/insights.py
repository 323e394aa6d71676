"""What a page says first: sentences that answer, each with the figures that it rests on."""

from collections.abc import Iterable

from paceline.core.insight import Insight, Topic
from paceline.report.markup import Html, element

_LABELS: dict[Topic, str] = {
    "limit": "what limits",
    "change": "what to change",
    "method": "method",
    "workers": "workers",
    "memory": "memory",
}
_NOTHING = "Too little is known of it to say anything."


def insights(rows: Iterable[Insight]) -> Html:
    """Return the first section of a page: what was found, in the order in which it comes."""
    found = [_item(row) for row in rows]
    content = element("ul", *found, class_="says") if found else element("p", _NOTHING)
    return element("section", element("h2", "What it says"), content)


def _item(row: Insight) -> Html:
    figures = (element("span", f"{name} ", element("b", value)) for name, value in row.figures)
    return element(
        "li",
        element("span", _LABELS[row.topic], class_="topic"),
        element(
            "div", element("span", row.sentence), element("div", *figures, class_="rests soft")
        ),
    )
