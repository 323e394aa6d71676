"""Write checkpoints where there is space for a small one only: `full_disk.py FOLDER limit? REASON`.

With "limit" a file may have 256 KiB at most; without, FOLDER is on a file system of 1 MiB.
"""

import logging
import resource
import sys
from pathlib import Path

import torch

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.writer import BackgroundWriter
from paceline.core.errors import CheckpointNotWritten

path, limit, reason = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
small, large = torch.arange(1000), torch.arange(400_000)  # 8 kB, 3.2 MB
folder = CheckpointFolder(path)
folder.write(1, {"model.safetensors": {"w": small}})


def check_first_is_there() -> None:
    assert [one.name for one in path.iterdir()] == ["step-00000001"], list(path.iterdir())
    loaded = CheckpointFolder(path).latest()
    assert torch.equal(loaded.tensors("model")["w"], small)


try:
    folder.write(2, {"progress.json": {}, "model.safetensors": {"a": small, "w": large}})
except CheckpointNotWritten as error:
    assert str(error) == (
        f"{path}: the checkpoint of step 2 cannot be written: {reason}; that of step 1 is kept"
    )
    print("refused")
check_first_is_there()

lines: list[str] = []


class Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines.append(f"{record.levelname} {record.getMessage()}")


logging.getLogger("paceline").addHandler(Lines())
writer = BackgroundWriter(folder)
assert writer.save(3, {"model/w": large}, {}, wait=True)
writer.poll()
assert len(lines) == 1, lines
assert lines[0].startswith("WARNING")
assert f"step 3 cannot be written: {reason}" in lines[0]
assert lines[0].endswith("; that of step 1 is kept; the run goes on")
assert writer.written_step is None
print("warned")
check_first_is_there()
assert writer.save(4, {"model/w": small}, {}, wait=True)
assert (writer.written_step, folder.steps, len(lines)) == (4, (1, 4), 1)
writer.close()
print("written")
