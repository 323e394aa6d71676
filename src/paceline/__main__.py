"""`python -m paceline` is the command line, for torchrun -m paceline."""

from paceline.cli import main

main()
