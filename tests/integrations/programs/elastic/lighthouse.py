"""Run a torchft lighthouse until a signal ends it; print its address."""

import signal

from torchft.coordination import LighthouseServer

SERVER = LighthouseServer(
    bind="127.0.0.1:0",
    min_replicas=1,
    join_timeout_ms=60_000,
    quorum_tick_ms=50,
    heartbeat_timeout_ms=2_000,
)
print(f"http://127.0.0.1:{SERVER.address().rpartition(':')[2]}", flush=True)
signal.pause()
