"""Register simulated GPUs when Python starts with this folder on PYTHONPATH."""

import os
import sys
from pathlib import Path

if os.environ.get("PACELINE_SIMULATED_GPUS", "0") != "0":
    sys.path.append(str(Path(__file__).parents[2]))  # the folder of all tests
    from simulated_gpu import instead as instead
