"""Cut connections, or hold back data, between a worker and its hub."""

import asyncio
import threading
from collections.abc import Callable

_PIECE_NBYTES = 1 << 16


class Proxy:
    """A TCP proxy for a local port, which runs in its own thread."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = self._loop.run_until_complete(listening)
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Abort all connections; new connections are still accepted."""
        self._do(lambda: [one.transport.abort() for one in self._open])

    def hold(self) -> None:
        """Hold back all data; the connections stay open."""
        self._do(self._flows.clear)

    def go_on(self) -> None:
        """Let data through again."""
        self._do(self._flows.set)

    def close(self) -> None:
        """Close the port and all connections, and end the thread."""
        self._do(self._server.close)
        self.cut()
        self.go_on()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _do(self, what: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(what)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other, to_other = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._forward(reader, to_other), self._forward(other, writer))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        self._open.add(target)
        try:
            while data := await source.read(_PIECE_NBYTES):
                await self._flows.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            self._open.discard(target)
            target.close()
