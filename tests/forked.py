"""A module whose `main` does what a test has set before it was forked."""

import sys


def run(*arguments: str) -> None:
    """Do nothing; tests set another."""


def main() -> None:
    run(*sys.argv[1:])
