"""A worker's end of the wire: requests with replies, over connections that may break."""

import threading
import time
from collections.abc import Callable

import zmq

from paceline.core.errors import InvalidInput, PacelineError, WorkerLost
from paceline.wire.addresses import to_connect
from paceline.wire.conversation import Bearing, Conversation
from paceline.wire.frames import NO_NONCE, Malformed
from paceline.wire.identity import Identity
from paceline.wire.keys import ClientKeys
from paceline.wire.line import Broken, KeyRefused, Line
from paceline.wire.messages import Message
from paceline.wire.outbox import Outbox, Pending
from paceline.wire.texts import one_line
from paceline.wire.traffic import Traffic
from paceline.wire.wake import Wake

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LASTING_S = 1.0  # a connection that held for so long is no sign that the next one will not


class Client:
    """A worker's connection to the hub; it is made again as often as it breaks.

    `deadline_s` is how long the hub may stay away. `say` is told what goes wrong and mends itself.
    Raises InvalidInput if the hub refuses this worker, with the difference; WorkerLost if no hub
    takes it in within the deadline.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        keys: ClientKeys | None,
        deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._address = to_connect(address, has_keys=keys is not None)
        self._worker, self._keys, self._say = identity.worker, keys, say
        self._outbox = Outbox()
        self._wake = Wake()
        self._closing = threading.Event()
        self._trouble = ""
        self.traffic = Traffic()
        self._bearing = Bearing(
            identity,
            self._outbox,
            self.traffic,
            self._wake,
            deadline_s,
            self._closing.is_set,
            self._note_join,
        )
        self._thread = threading.Thread(target=self._run, name="paceline-wire", daemon=True)
        self._thread.start()
        try:
            self._outbox.wait_until_joined()
        except BaseException:
            self.close()
            raise

    @property
    def settings(self) -> bytes:
        """What the hub tells its workers, such as the settings of the run."""
        return self._bearing.settings

    def request(self, message: Message) -> Pending:
        """Send a request, as soon as this worker's credit allows it.

        Raises InvalidInput if it is larger than the hub takes, HubRestarted if the hub has begun
        anew and nobody was told yet, WorkerLost if it stays away for longer than the deadline.
        """
        pending = self._outbox.admit(message)
        self._wake.set()
        return pending

    def close(self) -> None:
        """Say good-bye and disconnect. Requests without a reply get WorkerLost."""
        self._outbox.fail(WorkerLost("the connection to the hub was closed"))
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._keep_connected(context)
        except PacelineError as error:
            self._outbox.fail(error)
        except Exception as error:  # whoever waits must hear of it
            self._outbox.fail(WorkerLost(f"the connection to the hub failed: {error!r}"))
            raise
        finally:
            context.term()

    def _keep_connected(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            began_s = time.monotonic()
            self._converse(Line(context, self._address))
            has_lasted = time.monotonic() - began_s > _LASTING_S
            pause_s = _FIRST_PAUSE_S if has_lasted else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._closing.wait(pause_s)
            self._check_deadline()

    def _converse(self, line: Line) -> None:
        """Talk over a line until it breaks, or this is closed."""
        try:
            line.connect(self._keys)
            Conversation(line, self._bearing).hold()
        except (Broken, Malformed) as trouble:
            self._tell_once(one_line(str(trouble)))
        except KeyRefused as error:
            raise InvalidInput(
                f"the hub at {self._address} does not know this worker's key; its folder of keys "
                "needs the worker.pub that belongs to it"
            ) from error
        finally:
            line.close(politely=self._closing.is_set())

    def _tell_once(self, trouble: str) -> None:
        if trouble != self._trouble and not self._closing.is_set():
            self._trouble = trouble
            self._say(f"worker {self._worker}: {trouble}; connecting again")

    def _note_join(self, goes_on: bool) -> None:
        if not goes_on:
            self._say(f"worker {self._worker}: the hub has begun anew")
        elif self._trouble:
            self._say(f"worker {self._worker}: connected to the hub again")
        self._trouble = ""

    def _check_deadline(self) -> None:
        deadline_s = self._bearing.deadline_s
        if time.monotonic() - self._bearing.heard_s < deadline_s:
            return
        why = f": {self._trouble}" if self._trouble else ""
        if self._outbox.session == NO_NONCE:
            what = f"no hub at {self._address} has taken worker {self._worker} in"
        else:
            what = f"nothing was heard of the hub at {self._address}"
        raise WorkerLost(f"{what} within {deadline_s:g} s{why}")
