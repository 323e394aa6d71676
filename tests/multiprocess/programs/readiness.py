"""Run the cases of all files, or those named, with exchanges: arguments EXCHANGES [CASES]."""

import sys

import copies  # noqa: F401 - the cases, in these eight files
import differences  # noqa: F401
import graphs  # noqa: F401
import hooks  # noqa: F401
import interrupted  # noqa: F401
import layouts  # noqa: F401
import loops  # noqa: F401
import precision  # noqa: F401

from ranks import main

main(sys.argv[1].split(","), sys.argv[2].split(",") if len(sys.argv) > 2 else ())
