"""A command of Paceline in a process of its own, which does not outlive the study.

`python -m paceline.scaling.child PARENT train ...` is `python -m paceline train ...`, but that the
kernel ends it with its parent, and its own workers with it.
"""

import runpy
import sys

from paceline.native import die_with_parent


def main() -> None:
    """Carry out the command."""
    parent = sys.argv.pop(1)
    die_with_parent(int(parent))
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
