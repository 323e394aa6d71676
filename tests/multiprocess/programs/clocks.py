"""Print what rank 1 finds of its clock, which runs five seconds ahead, and what ranks gather."""

import json
import os
import time

from paceline.links.rendezvous import process_group
from paceline.record.merge import clock_offset, measure_offset

AHEAD_S = 5.0

with process_group(60) as group:
    ahead = AHEAD_S if group.rank == 1 else 0.0
    shared = clock_offset(group)
    measured = measure_offset(group, 1, lambda: time.monotonic() + ahead)
    rows = group.gather({"rank": group.rank, "text": "é" * (group.rank * 1000)})
    if group.rank == 1:
        print(json.dumps([shared.ahead_s, measured.ahead_s, measured.error_s, rows]))
    group.barrier()
os._exit(0)
