"""Become the command of this rank: role.py COMMANDS, a JSON list with each rank's words."""

import json
import os
import sys

_OF_RANKS = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    """Replace this process by the rank's command; exit if it has none."""
    words = json.loads(sys.argv[1])[int(os.environ.pop("RANK"))]
    for name in _OF_RANKS:
        os.environ.pop(name, None)
    if words:
        os.execv(words[0], words)  # noqa: S606 - the benchmark wrote these words


if __name__ == "__main__":
    main()
