"""What installing Paceline does to Python's path."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600


def test_what_stands_beside_the_project_cannot_be_imported(tmp_path):
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"],
        cwd=tmp_path,
        env={},
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    folders = {Path(entry).resolve() for entry in json.loads(found.stdout)}
    assert not folders & {ROOT, *ROOT.parents}
