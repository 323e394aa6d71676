"""The command that lays the papers' tables beside our values: papers."""

from typing import Annotated

import typer

from paceline.commands.options import Json, print_json


def papers(
    name: Annotated[str | None, typer.Argument(help="One paper; without it, all.")] = None,
    as_json: Json = False,
) -> None:
    """Print the papers' tables, our values beside the printed ones."""
    from paceline.papers import NAMES, paper
    from paceline.papers.tables import as_object, show
    from paceline.tables import console

    found = [paper(one) for one in ([name] if name else NAMES)]
    if as_json:
        print_json({"papers": [as_object(one) for one in found]})
    else:
        show(console(), found)
