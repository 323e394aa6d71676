"""A module whose `main` calls a function that a test sets before it forks."""

import sys


def run(*arguments: str) -> None:
    """Do nothing; tests replace this function."""


def main() -> None:
    run(*sys.argv[1:])
