"""A lighthouse and managers of torchft's quorums."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


@contextmanager
def lighthouse(join_timeout_ms: int = 30_000, min_replicas: int = 1) -> Iterator[str]:
    """Run a lighthouse that drops a worker a second after its last heartbeat; yield its address.

    `join_timeout_ms`: how long a quorum waits for living workers that do not join.
    """
    os.environ.setdefault("RUST_LOG", "error")  # without logs of each quorum
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1_000,
    )
    try:
        yield f"http://{LOOPBACK}:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def manager_of(address: str, worker: int, **options: Any) -> Any:
    """Return the manager of a worker, which is a replica group of one."""
    import torchft

    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    made = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        **{
            "min_replica_size": 1,
            "use_async_quorum": False,
            "timeout": TIMEOUT,
            "quorum_timeout": TIMEOUT,
            **options,
        },
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"worker{worker}",
        hostname=LOOPBACK,
    )
    made._store_of_test = store  # keep the store open as long as the manager
    return made
