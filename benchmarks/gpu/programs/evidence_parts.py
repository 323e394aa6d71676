"""Run parts of a test's own as benchmarks/gpu does: SECONDS FOLDER PART...

SECONDS is the deadline of each; a part is a module in a folder `evidence` on PYTHONPATH.
"""

import sys
from pathlib import Path

GPU = Path(__file__).parents[1]
sys.path[:0] = [str(GPU), str(GPU.parent)]

import main  # noqa: E402

deadline, folder, *parts = sys.argv[1:]
main._SMOKE_DEADLINE_S = float(deadline)
main.DEADLINES_S = dict.fromkeys(parts, 0.0)
sys.argv[1:] = [folder, *parts, "--smoke"]
sys.exit(main.main())
