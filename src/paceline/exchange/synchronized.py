"""A DistributedDataParallel whose gradients may go another way than torch's all-reduce.

It is one to everybody who asks: to isinstance, to torch.compile, to checkpoints and to the tools
that people train with. Only what it asks of its `reducer`, all that concerns gradients, may be
answered by one of ours (decision 17).
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, _register_comm_hook
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from paceline.core.errors import InvalidInput
from paceline.exchange.agreement import check_same, trainable
from paceline.exchange.all_reduce import TorchAllReduce
from paceline.exchange.arguments import (
    OF_TORCH_ALONE,
    device_of,
    is_checked,
    process_group_of,
    sends_buffers,
)
from paceline.exchange.join import Shadow
from paceline.exchange.logged import Logged
from paceline.exchange.method import Exchange, Method
from paceline.exchange.readiness import in_backward
from paceline.exchange.reducer import UNFINISHED, Reducer, Unfinished
from paceline.exchange.replica import NONE, Statistics
from paceline.links.group import Group, joined
from paceline.record.recorder import Recorder
from paceline.tune.chunk import ChunkTuner


class Synchronized(DistributedDataParallel):
    """Runs `module`, and gives its parameters the mean gradients of all ranks by `method`.

    `arguments` are DistributedDataParallel's; `group` is that of a run of ours. No rank waits for
    another longer than `deadline_s`, by default the process group's timeout. All ranks make it
    together; a copy, by deepcopy or pickle, meets its peers in its first exchange. Alone, without
    torch.distributed or as its only rank, it just calls the module. Raises InvalidInput for what
    the method cannot do.
    """

    reducer: Any  # torch's, or one of ours
    logger: Any

    def __init__(
        self,
        module: nn.Module,
        method: Method,
        deadline_s: float | None = None,
        *,
        group: Group | None = None,
        **arguments: Any,
    ) -> None:
        self._method, self._deadline_s = method, deadline_s
        self._gradients: Reducer | TorchAllReduce | None = None
        self._hears: Recorder | None = None
        if group is None:
            group = joined(device_of(module), deadline_s, process_group_of(arguments))
        self._group: Group | None = group
        self._is_alone = group.world_size == 1
        if self._is_alone:
            arguments["init_sync"] = False
            if not dist.is_initialized():
                arguments["process_group"] = _alone()
        else:
            self._check(module, arguments)
        super().__init__(module, **arguments)
        self._open()

    def _check(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Raise InvalidInput if ranks have different models, or for what `method` cannot do."""
        for name, why in OF_TORCH_ALONE.items():
            if self._method.make is not None and arguments.get(name):
                raise InvalidInput(f"{name}: {why}; exchange='allreduce' takes it")
        if is_checked(module, arguments):
            assert self._group is not None
            ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            check_same(module, self._group, set(ignored), sends_buffers(arguments))

    # What DistributedDataParallel does otherwise.

    def _ddp_init_helper(self, *arguments: Any) -> None:
        """Make the reducer: DistributedDataParallel calls this when its parameters are known."""
        ignored = self.parameters_to_ignore
        parameters = [p for name, p in self.module.named_parameters() if name not in ignored]
        self._trainable = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        self._types = [p.dtype for p in self._trainable]
        self._tuner: ChunkTuner | None = None
        is_torchs = self._method.make is None
        if self._is_alone or not is_torchs:
            self.reducer, self.logger = None, Logged()
        if self._is_alone:
            return
        if is_torchs:
            super()._ddp_init_helper(*arguments)
        if self._gradients is None:
            self._gradients = self._made(self._method, *arguments[:2])
        if isinstance(self._gradients, Reducer):
            self.reducer, self._tuner = self._gradients, self._gradients.tuner
            self._gradients.record(self._hears)
            self._passing_sync_batchnorm_handle(self.module)
        else:
            self._gradients.register(self.reducer, self._hears)
        end = weakref.finalize(self, self._gradients.close)
        end.atexit = False  # by then peers may have gone

    def _made(
        self, method: Method, parameters: Sequence[nn.Parameter], is_sparse: Sequence[bool]
    ) -> Reducer | TorchAllReduce:
        """Return what exchanges the gradients of these parameters by a method."""
        named = trainable(self.module, parameters)
        join = weakly(self._join)
        if method.make is None:
            return TorchAllReduce(named, method.compression, join, self._watcher())
        if self._use_python_reducer:
            raise InvalidInput(
                "torch._dynamo.config.optimize_ddp: 'python_reducer' compiles torch's all-reduce "
                "into the backward pass; choose exchange='allreduce'"
            )
        sparse = {id(p) for p, flag in zip(parameters, is_sparse, strict=True) if flag}
        layers = {one.layer for one in named if id(one.parameter) not in sparse}
        chunk = method.chunk
        return Reducer(
            named,
            _Making(method.make, self.gradient_as_bucket_view),
            join,
            chunk if isinstance(chunk, int) else chunk(max(1, len(layers))),
            sparse=[i for i, one in enumerate(named) if id(one.parameter) in sparse],
            find_unused_parameters=self.find_unused_parameters,
            on_exchanged=weakly(self._exchanged),
        )

    def _join(self) -> Group:
        if self._group is None:  # a copy's
            self._group = joined(self.device, self._deadline_s, self.process_group)
        return self._group

    def _open(self) -> None:
        if self._gradients is not None:
            self._gradients.open()

    def _watcher(self) -> Callable[[], None] | None:
        """Return whom to tell of torch's exchanges: nobody, as that takes a hook a parameter."""
        return None

    def _exchanged(self) -> None:
        """Gradients have been exchanged."""

    @torch.compiler.disable(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        if not self._is_alone:
            return super().forward(*inputs, **kwargs)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(
                inputs, kwargs, device, self.use_side_stream_for_tensor_copies
            )
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self.module(*inputs, **kwargs)

    @torch.compiler.disable
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not in_backward():
            self._before_forward()
        try:
            with self._naming_the_lost():
                return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if UNFINISHED in str(error):
                self.logger.set_error_and_log(str(error))
                raise Unfinished(str(error)) from error
            raise

    def _naming_the_lost(self) -> AbstractContextManager[None]:
        """Say who is gone when buffers cannot be sent, but as torch does where torch exchanges."""
        if self._group is None or self._method.make is None:
            return nullcontext()
        return self._group.naming_the_lost()

    def _is_as_made(self) -> bool:
        """Return whether parameters are trainable, and of the types, as when `reducer` was made."""
        types = [parameter.dtype for parameter in self._trainable]
        trained = all(parameter.requires_grad for parameter in self._trainable)
        thawed = any(parameter.requires_grad for parameter in self._frozen)
        return trained and not thawed and types == self._types

    def _before_forward(self) -> None:
        """Make the reducer anew for other trainable parameters, or types, than it was made for.

        A reducer of ours may keep parameters that get no gradients. Where all are frozen, as a
        discriminator's while its generator is trained, there is nothing to exchange either way.
        """
        has_changed = any(parameter.requires_grad for parameter in self._frozen)
        if isinstance(self._gradients, TorchAllReduce):
            trained = [parameter.requires_grad for parameter in self._trainable]
            has_changed |= any(trained) and not all(trained)
        else:
            has_changed |= [parameter.dtype for parameter in self._trainable] != self._types
        if has_changed:
            self._renew()

    @torch.compiler.disable
    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self._gradients is not None:
            tensors = [one for one in _find_tensors(output) if isinstance(one, Tensor)]
            self._gradients.forwarded(tensors, self.require_backward_grad_sync)
        return super()._post_forward(output)

    def _prepared(self, method: Method) -> Reducer | TorchAllReduce:
        """Return what exchanges by `method`, opened on all ranks together, for `_renew`.

        InvalidInput, on all ranks, if it cannot be used.
        """
        gradients = self._made(method, *self._build_params_for_reducer())
        gradients.open()
        return gradients

    def _renew(self, prepared: Reducer | TorchAllReduce | None = None) -> None:
        """Exchange gradients by `_method`, of the parameters that are trainable now.

        By what is prepared, or by what the ranks open in their first exchange: only there are they
        sure to be at the same place.
        """
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = prepared
        self._rebuild()

    def _rebuild(self) -> None:
        """Make the reducer anew, with what users have set it to."""
        self.reducer = None  # two reducers must not listen to the same gradients
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, sparse, names, self.static_graph)
        if self.static_graph and self.reducer is not None:
            self.reducer._set_static_graph()
            self._static_graph_delay_allreduce_enqueued = False
        for hook, state in self._comm_hooks:
            _register_comm_hook(self.reducer, state, hook)

    def _set_static_graph(self) -> None:
        try:
            super()._set_static_graph()
        except RuntimeError as error:
            self.logger.set_error_and_log(str(error))
            raise

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what this rank does when it has no samples left and others have."""
        hook = super().join_hook(**kwargs)
        gradients = self._gradients
        return Shadow(self, hook, gradients.shadow) if isinstance(gradients, Reducer) else hook

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have torch's all-reduce exchange buckets by `hook`; InvalidInput if there is none."""
        self._refuse_hooks("register_comm_hook")
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._refuse_hooks("_register_builtin_comm_hook")
        super()._register_builtin_comm_hook(comm_hook_type)

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        self._refuse_hooks("_register_fused_optim")
        super()._register_fused_optim(optim, *args, **kwargs)

    def _setup_in_backward_optimizers(self) -> None:
        if any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            self._refuse_hooks("_apply_optimizer_in_backward")
        super()._setup_in_backward_optimizers()

    def _refuse_hooks(self, what: str) -> None:
        if not self._is_alone and self._method.make is not None:
            raise InvalidInput(
                f"{what}: a hook exchanges buckets of torch's all-reduce, and exchange "
                f"{self._method.name!r} has none; choose exchange='allreduce'"
            )

    def _update_process_group(self, new_process_group: Any) -> None:
        if self._method.make is not None:
            raise InvalidInput(
                f"_update_process_group: exchange {self._method.name!r} shares memory or messages "
                "with the ranks it was made with; make the module parallel again"
            )
        super()._update_process_group(new_process_group)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return DistributedDataParallel's data of the exchange; of ours, what they have of it."""
        if isinstance(self.logger, Logged):
            return self.logger.data(self)
        data: dict[str, Any] = super()._get_ddp_logging_data()
        return data

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _add_prefix(state, prefix, self.module)
        super()._load_from_state_dict(state, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what belongs to this process: groups, hooks and memory."""
        if not self._is_alone:
            self._check_default_group()
        of_process = ("process_group", "reducer", "logger", "_group", "_gradients", "_tuner")
        state = copy.copy(self.__dict__)
        for name in (*of_process, "_trainable", "_frozen", "_types", "_hears"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a reducer of its own, which meets its peers in the first exchange."""
        self._group = self._gradients = self._hears = None
        if not state["_is_alone"]:
            super().__setstate__(state)
            return
        nn.Module.__setstate__(self, state)
        self.process_group = _alone()
        self._ddp_init_helper()

    # What runs of ours ask, as of every `Replica`.

    def record(self, recorder: Recorder | None) -> None:
        """Tell the recorder of all exchanges from now on; None ends that.

        Torch's reducer is made anew for that: a hook notes its collectives, and is only there to be
        recorded, as it costs a pass over the gradients.
        """
        before, self._hears = self._hears, recorder
        if isinstance(self._gradients, Reducer):
            self._gradients.record(recorder)
        elif self._gradients is not None and before is not recorder:
            self._rebuild()

    def statistics(self) -> Statistics:
        """Return what exchanging has taken so far on this rank."""
        return self._gradients.statistics() if self._gradients else NONE

    def close(self) -> None:
        """Stop exchanging and give back shared memory and threads; the module stays usable."""
        if self._gradients is not None:
            self._gradients.close()
        self.reducer = self._gradients = None
        self._is_alone = True


@dataclass(frozen=True)
class _Making:
    """Makes an exchange for a group."""

    make: Callable[[Group, bool], Exchange]
    as_views: bool

    def __call__(self, group: Group) -> Exchange:
        return self.make(group, self.as_views)


def _alone() -> dist.ProcessGroup:
    """Return a process group of one rank that nothing is ever sent in."""
    return dist.ProcessGroup(HashStore(), 0, 1)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the bound method without a reference to its object, which owns whoever calls it."""
    alive = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = alive()
        assert bound is not None
        return bound(*args)

    return call


def _add_prefix(state: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Give a state of the module itself the names that a state of ours has: "module." goes before.

    A state of ours has only such names, unless the module has a child of that name itself.
    """
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    own = set(module.state_dict(keep_vars=True))
    is_ours = all(name.startswith("module.") for name in names)
    if not names or (is_ours and not own.issuperset(names)):
        return
    for name in names:
        state[f"{prefix}module.{name}"] = state.pop(f"{prefix}{name}")
