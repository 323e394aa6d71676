"""Run the command line for `python -m paceline` and `torchrun -m paceline`."""

from paceline.cli import main

main()
