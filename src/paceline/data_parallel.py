"""A drop-in for torch's DistributedDataParallel, in a loop that stays the user's."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.choose import Choice, balanced, choose
from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline
from paceline.core.wire_format import check_codec
from paceline.data.balanced import BalancedSampler
from paceline.exchange.balanced import Balanced
from paceline.exchange.compressed import Compression
from paceline.exchange.nonfinite import Policy, check_policy
from paceline.exchange.readiness import in_backward
from paceline.exchange.replica import Alone, Replica, Statistics
from paceline.exchange.steps import Steps
from paceline.links.group import joined
from paceline.record.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.tune.chunk import Trial

_KEPT_STEPS = 8
EXCHANGES = ("auto", "allreduce", "tree", "host")


class DataParallel(nn.Module):
    """Runs `module` on this rank's samples, and gives its parameters the mean gradients of all.

    Launched with torchrun, one process a rank. A process group is made if there is none. All ranks
    must have the same model; it starts with the parameters and buffers of rank 0, whose buffers
    are sent before each forward pass in training.

    `exchange`: "host" sums in the memory of the machine while backward runs, "allreduce" is torch's
    DistributedDataParallel, "tree" updates on rank 0, and "auto" measures the three at the first
    forward pass in training and takes the one with the best prediction (`why` says the reason).
    `chunk`: how many layers "host" exchanges together; "auto" starts from a prediction and tries
    neighbours while training goes on. No rank waits longer than `deadline_s` for another:
    WorkerLost names the one that does not answer.

    `codec` encodes gradients on their way: between machines with "host", between all ranks with
    "allreduce"; "tree" has none. A name ("dynamic8", "half" and so on), a codec, or "auto" for what
    makes steps faster. No rank takes a step whose gradients are not finite: a GradScaler skips it;
    otherwise the optimizer raises NonFinite, or by `on_nonfinite` "skip" changes nothing.

    `balance`: "auto" lets ranks have unequal batches: each rank's gradients are weighted by its
    samples, so that all train as one process on all of them would, if the loss is a mean over
    samples. A rank may have none. `balance()` takes the sampler that is to follow the ranks'
    speeds. A rank that would not help gets no samples then, but with `force`.

    `state_dict` and `load_state_dict` are those of the module itself, without a prefix.
    Raises InvalidInput for what cannot be exchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        exchange: Literal["auto", "allreduce", "tree", "host"] = "auto",
        codec: str | Codec | None = None,
        chunk: int | Literal["auto"] = "auto",
        deadline_s: float = 30.0,
        on_nonfinite: Policy = "raise",
        balance: Literal["auto"] | None = None,
        force: bool = False,
    ) -> None:
        super().__init__()
        _check(exchange, chunk, balance)
        self.module = module
        self._exchange, self._chunk, self._deadline_s = exchange, chunk, deadline_s
        self._compression = _compression(exchange, codec, on_nonfinite)
        self._replica: Replica | None = None
        self._choice: Choice | None = None
        self._group = joined(_device_of(module), deadline_s)
        self._force = force
        self._balanced = balanced(module, self._group, force) if balance else None
        self._start()
        _accept_own_names(self)
        if self._group.world_size == 1:
            self._replica = self._balanced or Alone(module)
        elif exchange != "auto" and (exchange != "host" or chunk != "auto"):
            self._replicate(())

    def _start(self) -> None:
        """Begin to record, on this rank."""
        device = f"{self._group.device.type}{self._group.rank}"
        self._recorder = Recorder(clock_for(self._group.device), device, self._group.rank)
        self._recorder.start_phases(_KEPT_STEPS)
        self._steps = Steps(self._recorder, self.module)
        self._paused: ExitStack | None = None

    def _replicate(self, inputs: tuple[Any, ...]) -> Replica:
        if self._balanced is not None and inputs:
            self._balanced.check_first(inputs)
        choice = choose(
            self.module, inputs, self._group, self._exchange, self._chunk, self._compression
        )
        self._choice, self._replica = choice, choice.replica
        if choice.records:
            self._replica.record(self._recorder)
        if self._balanced is not None:
            self._replica = self._balanced.around(self._replica)
        if self._paused is not None:
            self._paused.enter_context(self._replica.no_sync())
        return self._replica

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        trains = self.training and torch.is_grad_enabled()
        if not trains or in_backward():
            outputs = (self._replica or self.module)(*args, **kwargs)
            if self._replica is None and torch.is_grad_enabled():
                _refuse_backward(outputs)
            return outputs
        replica = self._replica or self._replicate(args)
        self._steps.begin_forward()
        outputs = replica(*args, **kwargs)
        self._recorder.end_phase()
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone: for all micro-batches of a step but the last.

        As with DistributedDataParallel the forward passes belong inside, too.
        """
        with ExitStack() as inside:
            if self._replica is None:
                self._paused = inside  # the first forward pass in here makes the replica
            else:
                inside.enter_context(self._replica.no_sync())
            try:
                yield
            finally:
                self._paused = None

    def balance(self, sampler: BalancedSampler) -> BalancedSampler:
        """Have batches follow the ranks' speeds: as this sampler, which is returned, splits them.

        All ranks must call it together, each with its own rank's sampler of the same batches.
        InvalidInput without `balance="auto"`, and for a sampler that does not fit.
        """
        self._balancing().follow(sampler)
        return sampler

    def samples(self, number: int) -> None:
        """Say how many samples the next forward pass has: else the rows of its first tensor."""
        self._balancing().samples(number)

    def _balancing(self) -> Balanced:
        if self._balanced is None:
            raise InvalidInput("balance: batches are equal here; DataParallel(..., balance='auto')")
        return self._balanced

    @property
    def why(self) -> str:
        """Why this exchange and chunk, with the figures they rest on; known after one forward."""
        return self._choice.why if self._choice else "not chosen yet"

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The chunk sizes tried so far, predicted and measured on rank 0."""
        return self._choice.trials if self._choice else ()

    def statistics(self) -> Statistics:
        """Return what exchanging gradients has taken so far on this rank."""
        return (self._replica or Alone(self.module)).statistics()

    def timeline(self) -> Timeline:
        """Return what happened on this rank in its last steps; the first span starts at zero."""
        spans = sorted(self._recorder.spans(), key=lambda span: span.start_s)
        start = spans[0].start_s if spans else 0.0
        return Timeline(
            (s._replace(start_s=s.start_s - start, end_s=s.end_s - start) for s in spans),
            "measured",
        )

    def close(self) -> None:
        """Stop exchanging and give back shared memory and threads; the module stays usable."""
        self._steps.close()
        if self._replica is not None:
            self._replica.close()
        self._replica = Alone(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state."""
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataParallel":
        """Return a copy that exchanges for itself, from its first training step on."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        copied.module = copy.deepcopy(self.module, memo)
        copied.training = self.training
        copied._exchange, copied._chunk = self._exchange, self._chunk
        copied._deadline_s, copied._group = self._deadline_s, self._group
        copied._compression = self._compression
        copied._choice, copied._replica, copied._force = None, None, self._force
        is_balanced, group = self._balanced is not None, self._group
        copied._balanced = balanced(copied.module, group, self._force) if is_balanced else None
        if group.world_size == 1:
            copied._replica = copied._balanced or Alone(copied.module)
        _accept_own_names(copied)
        copied._start()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: shared memory and process groups cannot be written down."""
        raise InvalidInput("DataParallel cannot be pickled; save its state_dict()")


def _check(exchange: str, chunk: object, balance: object) -> None:
    if exchange not in EXCHANGES:
        raise InvalidInput(f"exchange: {exchange!r} is not known; choose one of {EXCHANGES}")
    if chunk != "auto" and not (isinstance(chunk, int) and chunk >= 1):
        raise InvalidInput(f"chunk: must be 'auto' or a number of layers, not {chunk!r}")
    if balance not in (None, "auto"):
        raise InvalidInput(
            f"balance: must be 'auto' or None, not {balance!r}; balance(sampler) takes a sampler"
        )


def _compression(
    exchange: str, codec: str | Codec | None, on_nonfinite: Policy
) -> Compression | None:
    check_policy(on_nonfinite)
    if codec is None:
        return None
    if exchange == "tree":
        raise InvalidInput("codec: exchange 'tree' has none; choose 'host' or 'allreduce'")
    if isinstance(codec, str):
        check_codec(codec)
    return Compression(codec, on_nonfinite)


def _device_of(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    if parameter is None:
        raise InvalidInput("module: has no parameters to train")
    return parameter.device


def _refuse_backward(outputs: Any) -> None:
    """Have a backward pass fail that reaches these outputs: nobody would exchange its gradients."""

    def refuse(gradient: Tensor) -> None:
        raise InvalidInput(
            "the first step must be one in training mode and outside of checkpoints: it shows what "
            "there is to exchange"
        )

    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(refuse)


def _accept_own_names(parallel: DataParallel) -> None:
    parallel._register_load_state_dict_pre_hook(_renamed)  # type: ignore[no-untyped-call]


def _renamed(state: dict[str, Any], prefix: str, *_: object) -> None:
    """Give a state that was saved without our prefix the names that a parent module looks for."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name[len(prefix) :]}"] = state.pop(name)
