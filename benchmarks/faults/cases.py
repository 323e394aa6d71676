"""Define the runs that `loop` disturbs: each strategy, a separate hub, and a user's loop."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from attempt import Attempt
from paceline.rpc.keys import generate_keys
from proxy import Proxy

HERE = Path(__file__).parent
MODULES = HERE.parent / "resume"  # its recipes train in seconds
DEADLINE_S = 4.0
_COMMAND = ("-m", "paceline")
_TRAINED = (
    *("--batch-size", "24", "--profile-s", "0.2", "--timeout", str(DEADLINE_S)),
    *("--checkpoint-every", "1s"),
)


class Case(NamedTuple):
    """A recipe, its options and number of epochs, and the role of its first process."""

    recipe: str
    options: str
    epochs: int
    lead: str = "launcher"


LAUNCHED: Mapping[str, Case] = {
    "allreduce": Case("with_all", "--strategy allreduce --workers 2", 100),
    "host": Case("with_all", "--strategy host --workers 3", 100),
    "tree": Case("with_all", "--strategy tree --workers 2", 100),
    "subbatch": Case("classes", "--strategy subbatch --workers 2", 60),
    "hogbatch": Case(
        "classes",
        "--strategy hogbatch --workers cpu:1 --strategy-option policy=hogbatch",
        60,
        "coordinator",
    ),
    "wheel": Case("plain", "--strategy wheel --workers 2 --strategy-option lanes=1", 40, "hub"),
    "local": Case("plain", "--strategy local --workers 2 --strategy-option sync_every=5", 100),
}
SERVED: Mapping[str, Case] = {
    "wheel, hub apart": Case("plain", "--strategy wheel --strategy-option lanes=1", 60, "hub"),
}
OWN_LOOP = "a user's loop"
NAMES = (*LAUNCHED, *SERVED, OWN_LOOP)
_OWN_STEPS, _OWN_RANKS, _SERVED_WORKERS = 4000, 2, 2
_OWN_ENDS_S = 240.0  # if torchrun is killed, its ranks train to their last step


class Trial:
    """The commands of one run: the first writes the result, the others are its workers.

    `proxies` connect the workers to their hub; `stack` closes them.
    """

    def __init__(self, stack: ExitStack, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.output = folder / "runs"
        self.proxies: list[Proxy] = []
        self.workers: list[Attempt] = []
        if name in LAUNCHED:
            self.first = self._launched(LAUNCHED[name])
        elif name in SERVED:
            self.first = self._served(SERVED[name])
            stack.callback(self._close_proxies)
        else:
            self.first = self._own_loop()

    @property
    def attempts(self) -> list[Attempt]:
        """The first command, then its workers."""
        return [self.first, *self.workers]

    def join(self) -> None:
        """Start the workers of a separate hub, each behind a proxy, once the hub listens."""
        if self.name not in SERVED or (port := self.first.port()) is None:
            return
        for number in range(_SERVED_WORKERS):
            self.proxies.append(Proxy(port))
            arguments = (
                *(*_COMMAND, "worker", "--connect", f"tcp://127.0.0.1:{self.proxies[-1].port}"),
                *("--worker-ids", str(number), "--keys", "keys", "--device", "cpu"),
                *("--threads", "1", "--timeout", str(DEADLINE_S)),
            )
            self.workers.append(Attempt(arguments, self.folder, f"worker {number}", MODULES))

    def _launched(self, case: Case) -> Attempt:
        return Attempt((*_COMMAND, "train", *self._asked(case)), self.folder, case.lead, MODULES)

    def _served(self, case: Case) -> Attempt:
        generate_keys(self.folder / "keys")
        arguments = (
            *(*_COMMAND, "hub", *self._asked(case), "--workers", str(_SERVED_WORKERS)),
            *("--listen", "tcp://127.0.0.1:0", "--keys", "keys", "--wait", "20"),
        )
        return Attempt(arguments, self.folder, case.lead, MODULES)

    def _own_loop(self) -> Attempt:
        arguments = (
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_OWN_RANKS)),
            *(str(HERE / "own_loop.py"), str(_OWN_STEPS), str(DEADLINE_S)),
        )
        return Attempt(arguments, self.folder, "torchrun", MODULES, _OWN_ENDS_S)

    def _asked(self, case: Case) -> tuple[str, ...]:
        recipe, options = f"small:{case.recipe}", case.options.split()
        epochs = ("--epochs", str(case.epochs), "--output", str(self.output))
        return (recipe, *options, *_TRAINED, *epochs)

    def _close_proxies(self) -> None:
        for proxy in self.proxies:
            proxy.close()
