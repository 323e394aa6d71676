"""A drop-in replacement for torch's DistributedDataParallel in the user's own loop."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.codecs.codec import Codec
from paceline.core.chunks import LearnedSearch, Trial
from paceline.core.errors import InvalidInput
from paceline.core.names import not_known
from paceline.core.timeline import Origin, Timeline
from paceline.exchange.all_reduce import TorchAllReduce
from paceline.exchange.balanced import Balanced
from paceline.exchange.compressed import Compression
from paceline.exchange.optimizers import Policy, StepRecorder, check_policy
from paceline.exchange.readiness import in_backward, weakly
from paceline.exchange.reducer import Reducer
from paceline.exchange.replica import Method, SingleReplica, Statistics
from paceline.exchange.synchronized import OF_TORCH_ALONE
from paceline.exchange.trials import Trials
from paceline.exchange.trying import Trying
from paceline.links.clock import clock_for
from paceline.links.devices import device_of
from paceline.planner.admission import refused_workers
from paceline.record.recorder import Recorder
from paceline.strategies import EXCHANGES
from paceline.training.data.sampler import BalancedSampler

_KEPT_STEPS = 8
AUTO = "auto"
logger = logging.getLogger(__name__)


class DataParallel(Trying):
    """Runs `module` on this rank's samples and averages the gradients of all ranks.

    It has the arguments and behaviour of torch's DistributedDataParallel. At creation it checks
    that all ranks have the same model, and broadcasts rank 0's parameters and buffers. Before each
    forward pass it broadcasts rank 0's buffers. If a parameter got no gradient in a backward pass,
    the next forward pass raises an error, unless `find_unused_parameters` is set. Arguments about
    buckets (`bucket_cap_mb`, `bucket_cap_mb_list`, `batched_grad_copy`,
    `skip_all_reduce_unused_params`) affect only torch's reducer. Launch one process per rank with
    torchrun. The default process group is created if it is missing. Without torchrun's environment
    variables, DataParallel only calls the module.

    `exchange`: how gradients are averaged. "host" sums them in host memory during backward.
    "allreduce" uses torch's reducer. "tree" sums them in a binary tree, the classical baseline.
    "auto" tries each exchange for a few steps and keeps the fastest; the property `why` has the
    measured times.
    `chunk`: number of layers that "host" exchanges together. "auto" predicts it from the first
    steps and tries neighbouring values during training. `deadline_s`: longest wait for another
    rank, after which WorkerLost names that rank. Default: the process group's timeout.

    `codec` encodes (compresses) gradients: a name such as "dynamic8", a codec object, or "auto",
    which encodes only if steps get faster. Exchange "host" encodes gradients only between machines;
    "allreduce" encodes them between all ranks. With a codec, a GradScaler skips each step with NaN
    or infinite gradients. Without a GradScaler, `optimizer.step()` raises NonFinite, or skips the
    step if `on_nonfinite` is "skip".

    `balance="auto"` allows ranks to have batches of unequal sizes, even empty ones. Each rank's
    gradients are weighted by its number of samples; the result is exact if each loss is a mean over
    samples. Pass the sampler to `balance()`, which adapts batch sizes to the ranks' speeds. A rank
    that would slow down the other ranks gets no samples, unless `keep_all` is set.

    Keys of `state_dict` have the prefix "module."; `load_state_dict` accepts keys with and without
    the prefix. Gradients do not share memory with the exchange, unless `gradient_as_bucket_view` is
    set. Raises InvalidInput for modules or options that are not supported.
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
        keep_all: bool = False,
    ) -> None:
        given = _changed(locals())
        if balance not in (None, "auto"):
            hint = "pass a sampler to the method balance()"
            raise InvalidInput("balance", "must be 'auto' or None", got=balance, hint=hint)
        check_policy(on_nonfinite)
        self._is_balanced, self._keep_all = balance == "auto", keep_all
        compression = None if codec is None else Compression(codec, on_nonfinite)
        of_torch = sorted(OF_TORCH_ALONE.keys() & given.keys())
        methods = _methods(exchange, chunk, compression, bool(of_torch))
        self._why = f"{methods[0].name}: " + ("; ".join(of_torch) or "requested")
        super().__init__(module, {one.name: one for one in methods}, None, deadline_s, **given)
        self._start()
        if self._is_alone:
            self._why = "none: a single rank does not exchange gradients"
        elif self._tries:
            clock, shares = clock_for(self.device), weakly(self._shares)
            self._trials = Trials(self._candidates, clock, shares=shares)

    def _start(self) -> None:
        rank = 0 if self._is_alone else dist.get_rank(self.process_group)
        clock = clock_for(self.device)
        self._recorder = Recorder(clock, f"{device_of(self.device).kind}{rank}", rank)
        self._recorder.start_trace(num_kept=_KEPT_STEPS)
        self._steps = StepRecorder(self._recorder, self.module)
        self._balanced: Balanced | None = None
        if self._is_balanced:
            replica = SingleReplica(self.module)
            self._balanced = Balanced(
                replica, self.module, self._join(), admit=weakly(self._refused)
            )
        self._record_own()

    def _record_own(self) -> None:
        # Do not record torch's reducer: recording would take another pass over all gradients.
        if not self._method.uses_torch_reducer:
            self.record(self._recorder)

    @torch.compiler.disable(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, as DistributedDataParallel does."""
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

    # Trials of exchanges.

    def _use(self, name: str, prepared: Reducer | TorchAllReduce | None = None) -> None:
        self._reducer_recorder = None
        super()._use(name, prepared)
        self._record_own()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook; from then on, exchange "auto" uses torch's reducer."""
        tried = () if self._trials is None else self._candidates.values()
        if any(one.compression is not None for one in (self._method, *tried)):
            problem = "cannot be combined with the option codec, which uses its own hook"
            raise InvalidInput("register_comm_hook", problem)
        if self._trials is not None:
            self._trials, self._next, self._tries = None, None, False
            [method] = _methods(AUTO, 1, None, needs_torch_reducer=True)
            self._why = f"{method.name}: a communication hook was registered"
            self._use(method.name)
        super().register_comm_hook(state, hook)

    @property
    def why(self) -> str:
        """A line of text: the exchange in use, the reason for it, and measured step times."""
        if self._trials is None:
            return self._why
        if self._join_config.enable:
            return f"{self._method.name}: no other exchange is tried within join()"
        return self._trials.why

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Tried numbers of layers per chunk, with rank 0's predicted and measured step times."""
        return self._tuner.trials if self._tuner else ()

    # Balanced batches.

    def balance(self, sampler: BalancedSampler) -> BalancedSampler:
        """Adapt the sampler's batch size on each rank to the ranks' speeds; return the sampler.

        All ranks must call this method together. Raises InvalidInput without `balance="auto"`, or
        if the ranks' samplers have different batches.
        """
        self._balancing().follow(sampler)
        return sampler

    def samples(self, number: int) -> None:
        """Set this rank's number of samples in the next forward pass.

        Default: the number of rows of the forward pass's first tensor.
        """
        self._balancing().samples(number)

    def _shares(self) -> tuple[int, ...]:
        return () if self._balanced is None else self._balanced.shares

    def _balancing(self) -> Balanced:
        if self._balanced is None:
            raise InvalidInput("balance", "requires DataParallel(..., balance='auto')")
        return self._balanced

    def _refused(self, speeds: Sequence[float], sampler: BalancedSampler) -> list[int]:
        """Return the ranks that would slow down the others, and thus get no samples.

        Rank 0 logs the reasons. With `keep_all`, returns no ranks. `speeds`: samples per second.
        """
        refused = refused_workers(speeds, sampler.batch_size, sampler.most)
        no_samples = "gets no samples (override with keep_all)"
        end = "is kept because of keep_all" if self._keep_all else no_samples
        for why in refused.values() if self._join().rank == 0 else ():
            logger.warning("paceline: %s; it %s", why, end)
        return [] if self._keep_all else list(refused)

    # Measurements.

    def statistics(self) -> Statistics:
        """Return traffic and time of this rank's exchanges; if batches are balanced, also speeds.

        With exchange "auto", only exchanges by the method in use are counted.
        """
        found = super().statistics()
        return self._balanced.shared(found) if self._balanced else found

    def timeline(self) -> Timeline:
        """Return the times of the parts of this rank's last steps; the first starts at 0."""
        spans = sorted(self._recorder.spans(), key=lambda span: span.start_s)
        start = spans[0].start_s if spans else 0.0
        return Timeline((span.moved(-start) for span in spans), Origin.MEASURED)

    def close(self) -> None:
        """Stop averaging gradients, and free memory and threads; the module stays usable."""
        self._steps.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_why": self.why}
        for name in ("_recorder", "_steps", "_balanced", "_candidates", "_trials", "_next"):
            state.pop(name, None)  # a copy by pickle or deepcopy does not try other methods
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._trials = self._next = None  # a copy keeps the original's current exchange method
        state["_tries"] = False
        super().__setstate__(state)
        self._start()


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataParallel.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    and parameter.default is not inspect.Parameter.empty
}


def _changed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Select from `arguments` those of DistributedDataParallel that differ from their defaults."""
    known = {name: value for name, value in arguments.items() if name in _DEFAULTS}
    return {name: value for name, value in known.items() if value is not _DEFAULTS[name]}


def _methods(
    exchange: str, chunk: int | str, compression: Compression | None, needs_torch_reducer: bool
) -> list[Method]:
    """Return the requested exchange method; for "auto", all methods that support the codec.

    With `needs_torch_reducer`, "auto" returns only torch's reducer. Raises InvalidInput if the
    exchange or chunk is unknown, or if the requested method does not support a codec.
    """
    known = (AUTO, *EXCHANGES)
    if exchange not in known:
        raise not_known("exchange", exchange, known)
    if chunk != AUTO and not (isinstance(chunk, int) and chunk >= 1):
        raise InvalidInput("chunk", "must be 'auto' or at least 1", got=chunk)
    asked = LearnedSearch if chunk == AUTO else chunk
    every: dict[str, Method] = {
        name: one.runner().method(one.config(), compression, asked)
        for name, one in EXCHANGES.items()
    }
    # Try exchanges with chunks last: their reducers learn a good number of layers per chunk. If the
    # exchange tried last is chosen, its reducer stays in use, with that number.
    found = sorted(every.values(), key=lambda method: method.chunk is not None)
    encodable = [one for one in found if one.takes_codec or compression is None]
    if exchange == AUTO:
        return [one for one in encodable if one.uses_torch_reducer or not needs_torch_reducer]
    if every[exchange] not in encodable:
        others = " or ".join(repr(one.name) for one in reversed(encodable))
        why = f"is not supported by exchange {exchange!r}"
        raise InvalidInput("codec", why, hint=f"use exchange {others}")
    return [every[exchange]]


def check_hook(argument: str, exchange: str = AUTO) -> None:
    """Raise InvalidInput for `argument` if `exchange` does not support communication hooks."""
    # "auto" is valid, because it uses torch's reducer for a hook. For an unknown exchange,
    # DataParallel raises an error later.
    known = _methods(exchange, 1, None, needs_torch_reducer=False) if exchange in EXCHANGES else []
    if not all(method.uses_torch_reducer for method in known):
        raise InvalidInput(
            argument,
            f"is not supported by exchange {exchange!r}",
            hint="use exchange='allreduce', or a codec",
        )
