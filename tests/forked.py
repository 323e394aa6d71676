"""A module whose `main` runs code, or calls a function that a test sets before it forks."""

import sys


def run(code: str = "", *_: str) -> None:
    """Run code that sees its own arguments; tests replace this function."""
    del sys.argv[1:2]
    exec(code, {"__name__": "__main__"})


def main() -> None:
    run(*sys.argv[1:])


if __name__ == "__main__":
    main()
