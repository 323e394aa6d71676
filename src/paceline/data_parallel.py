"""A drop-in for torch's DistributedDataParallel, in a loop that stays the user's."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.choose import balanced, methods
from paceline.codecs.codec import Codec
from paceline.core.errors import InvalidInput
from paceline.core.timeline import Timeline
from paceline.core.wire_format import check_codec
from paceline.data.balanced import BalancedSampler
from paceline.exchange.all_reduce import TorchAllReduce
from paceline.exchange.arguments import OF_TORCH_ALONE
from paceline.exchange.balanced import Balanced
from paceline.exchange.compressed import Compression
from paceline.exchange.method import Method
from paceline.exchange.nonfinite import Policy, check_policy
from paceline.exchange.readiness import in_backward
from paceline.exchange.reducer import Reducer
from paceline.exchange.replica import Statistics
from paceline.exchange.steps import Steps
from paceline.exchange.synchronized import Synchronized, weakly
from paceline.exchange.trials import Trials
from paceline.record.clock import clock_for
from paceline.record.recorder import Recorder
from paceline.tune.chunk import Trial

_KEPT_STEPS = 8
EXCHANGES = ("auto", "allreduce", "tree", "host")


class DataParallel(Synchronized):
    """Runs `module` on this rank's samples, and gives its parameters the mean gradients of all.

    It is a DistributedDataParallel, takes its arguments, in its order, and does what it does: it
    broadcasts and checks the module when it is made, sends rank 0's buffers before each forward
    pass, never runs the module but when it is called, and raises after a backward pass in which a
    parameter got no gradient, unless `find_unused_parameters`. What sizes or skips buckets of
    torch's reducer (`bucket_cap_mb`, `bucket_cap_mb_list`, `batched_grad_copy`,
    `skip_all_reduce_unused_params`) changes no gradient, and nothing where there are none.
    Launched with torchrun, one process a rank; a default process group is made if there is none,
    and without torchrun's environment it just calls the module.

    `exchange`: "host" sums in the memory of the machine while backward runs, "allreduce" is torch's
    own reducer, "tree" the classical baseline, and "auto" takes a few steps of each and stays with
    the fastest (`why` says the figures). `chunk`: how many layers "host" exchanges together; "auto"
    predicts it from its first steps, and tries neighbours while training goes on. No rank waits
    longer than `deadline_s` for another, by default than the process group's timeout: WorkerLost
    names the one that does not answer.

    `codec` encodes gradients on their way: between machines with "host", between all ranks with
    "allreduce"; "tree" has none. A name ("dynamic8", "half" and so on), a codec, or "auto" for what
    makes steps faster. No rank takes a step whose gradients are not finite: a GradScaler skips it;
    otherwise the optimizer raises NonFinite, or by `on_nonfinite` "skip" changes nothing.

    `balance`: "auto" lets ranks have unequal batches: each rank's gradients are weighted by its
    samples, so that all train as one process on all of them would, if the loss is a mean over
    samples. A rank may have none. `balance()` takes the sampler that is to follow the ranks'
    speeds. A rank that would not help gets no samples then, but with `force`.

    `state_dict` is DistributedDataParallel's, with the prefix "module."; `load_state_dict` takes it
    with and without. Gradients are the caller's, unless `gradient_as_bucket_view`. Raises
    InvalidInput for what cannot be exchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        exchange: Literal["auto", "allreduce", "tree", "host"] = "auto",
        codec: str | Codec | None = None,
        chunk: int | Literal["auto"] = "auto",
        deadline_s: float | None = None,
        on_nonfinite: Policy = "raise",
        balance: Literal["auto"] | None = None,
        force: bool = False,
    ) -> None:
        given = _given(locals())
        _check(exchange, chunk, balance)
        compression = _compression(exchange, codec, on_nonfinite)
        of_torch = sorted(OF_TORCH_ALONE.keys() & given.keys())
        candidates = methods(exchange, chunk, compression, bool(of_torch))
        self._trials: Trials | None = None
        self._next: tuple[Method, Reducer | TorchAllReduce] | None = None
        self._tries = len(candidates) > 1
        self._is_balanced, self._force = balance == "auto", force
        self._why = f"{candidates[0].name}: " + ("; ".join(of_torch) or "asked for")
        super().__init__(module, candidates[0], deadline_s, **given)
        self._start()
        if self._is_alone:
            self._why = "none: a single rank has nobody to exchange gradients with"
        elif self._tries:
            self._trials = Trials(candidates, clock_for(self.device))
        self._record_own()

    def _start(self) -> None:
        """Begin to record, on this rank."""
        rank = 0 if self._is_alone else dist.get_rank(self.process_group)
        clock = clock_for(self.device)
        self._recorder = Recorder(clock, f"{self.device.type}{rank}", rank)
        self._recorder.start_phases(_KEPT_STEPS)
        self._steps = Steps(self._recorder, self.module)
        self._balanced: Balanced | None = None
        if self._is_balanced:
            self._balanced = balanced(self.module, self._join(), self._force)

    def _record_own(self) -> None:
        """Record exchanges of ours: those of torch's reducer would cost a pass over gradients."""
        if self._method.make is not None:
            self.record(self._recorder)

    @torch.compiler.disable(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        trains = self.training and torch.is_grad_enabled() and not in_backward()
        if trains:
            self._steps.begin_forward()
        if self._balanced is None:
            outputs = super().forward(*inputs, **kwargs)
        else:
            outputs = self._balanced.run(super().forward, inputs, kwargs)
        if trains:
            self._recorder.end_phase()
        return outputs

    # The choice of an exchange.

    def _watcher(self) -> Callable[[], None] | None:
        return weakly(self._exchanged) if self._tries else None

    def _exchanged(self) -> None:
        """Decide how to go on, where all ranks are at the same place: after an exchange."""
        trials = self._trials
        # Who has no samples left within join() takes part in exchanges, but decides nothing.
        if trials is None or self._next is not None or self._join_config.enable:
            return
        trials.exchanged()
        if trials.due:
            trials.go_on(self._join())
            self._prepare(trials)

    def _prepare(self, trials: Trials) -> None:
        """Get what the method that is to be tried, or that has won, needs."""
        while self._next is None and not (trials.settled and self._method is trials.method):
            try:
                self._tries = not trials.settled
                self._next = trials.method, self._prepared(trials.method)
            except InvalidInput as error:  # on all ranks
                trials.fail(error)
        if self._next is None and isinstance(self._gradients, TorchAllReduce):
            self._gradients.unwatch()

    def _before_forward(self) -> None:
        if self._next is not None and self._gradients is not None and not self._gradients.pending:
            (method, prepared), self._next = self._next, None
            if self._is_as_made():
                self._use(method, prepared)
            else:  # what is prepared is for the parameters before
                prepared.close()
                self._use(method)
        super()._before_forward()

    def _use(self, method: Method, prepared: Reducer | TorchAllReduce | None = None) -> None:
        self._method, self._hears = method, None
        self._renew(prepared)
        self._record_own()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have torch's all-reduce exchange buckets by `hook`; exchange "auto" then takes it."""
        if self._method.compression is not None:
            raise InvalidInput(
                "register_comm_hook: gradients are encoded already, by codec=...; use either"
            )
        if self._trials is not None:
            self._trials, self._next, self._tries = None, None, False
            self._why = "allreduce: a communication hook was registered"
            [method] = methods("allreduce", 1, None, of_torch_alone=True)
            self._use(method)
        super().register_comm_hook(state, hook)

    @property
    def why(self) -> str:
        """Why this exchange is used, with the figures that it rests on."""
        if self._trials is None:
            return self._why
        if self._join_config.enable:
            return f"{self._method.name}: within join() no other is tried"
        return self._trials.why

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The chunk sizes tried so far, predicted and measured on rank 0."""
        return self._tuner.trials if self._tuner else ()

    # Balanced batches.

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

    # What has happened.

    def statistics(self) -> Statistics:
        """Return what exchanging gradients has taken so far on this rank.

        With exchange "auto" that is since the exchange in use was taken up.
        """
        statistics = super().statistics()
        return self._balanced.shared(statistics) if self._balanced else statistics

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
        if self._next is not None:
            self._next[1].close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_why": self.why}
        for name in ("_recorder", "_steps", "_balanced", "_trials", "_next"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._trials, self._next, state["_tries"] = (
            None,
            None,
            False,
        )  # a copy keeps what was in use
        super().__setstate__(state)
        self._start()
        self._record_own()


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataParallel.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return DistributedDataParallel's arguments that are not left to their defaults."""
    return {
        name: values[name]
        for name, default in _DEFAULTS.items()
        if name not in ("self", "module") and values[name] is not default
    }


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
