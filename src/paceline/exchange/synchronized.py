"""DistributedDataParallel (DDP) that can average gradients by a Paceline exchange.

`Synchronized` is a subclass of DistributedDataParallel, so that isinstance, torch.compile,
checkpoints and training tools recognise the class. Only its `reducer` and logger are replaced
(docs/decisions, number 17).
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, _register_comm_hook
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.nn.parameter import is_lazy

from paceline.core.chunks import ChunkTuner
from paceline.core.errors import InvalidInput
from paceline.exchange.all_reduce import TorchAllReduce
from paceline.exchange.ddp_logger import DDPLogger
from paceline.exchange.layout import check_same, trainable
from paceline.exchange.readiness import in_backward, weakly
from paceline.exchange.reducer import UNFINISHED, Reducer, Unfinished
from paceline.exchange.replica import NONE, Method, Statistics
from paceline.links.group import Group
from paceline.links.rendezvous import joined
from paceline.record.recorder import Recorder

# Arguments of DDP that only torch's own reducer supports, and the error's hint at an alternative.
OF_TORCH_ALONE = {
    "mixed_precision": "or use torch.autocast",
    "delay_all_reduce_named_params": "",
    "param_to_hook_all_reduce": "",
}


class Synchronized(DistributedDataParallel):
    """Runs a module, and averages its gradients by `method`; all ranks create it together.

    `arguments`: arguments of DistributedDataParallel. `group`: the ranks of a Paceline run
    (default: the process group of `arguments`). `deadline_s`: longest wait for another rank
    (default: the process group's timeout). A copy by deepcopy or pickle connects to the other
    ranks' copies in its first exchange. With a single process, only the module is called.
    """

    reducer: Any  # torch's reducer, or Paceline's Reducer
    logger: Any
    _gradients: Reducer | TorchAllReduce | None = None
    _reducer_recorder: Recorder | None = None
    _end: "weakref.finalize[..., Any] | None" = None  # closes the reducer once this is garbage
    _tries = False  # True if a subclass's `_exchanged` tries several methods

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
        if group is None:
            parameter = next(module.parameters(), None)
            device = torch.device("cpu") if parameter is None else parameter.device
            mesh, named = arguments.get("device_mesh"), arguments.get("process_group")
            if mesh is not None and named is None and mesh.ndim == 1:
                named = mesh.get_group(mesh_dim=0)
            group = joined(device, deadline_s, named)  # `named` is None for torch's default group
        self._group: Group | None = group
        self._is_alone = not group.exchanges
        if self._is_alone:
            arguments["init_sync"] = False  # there are no other ranks to synchronize with
            if not dist.is_initialized():
                # DDP requires a process group: create one of a single rank, which sends nothing
                arguments["process_group"] = dist.ProcessGroup(HashStore(), 0, 1)
        else:
            # check before DDP's constructor, whose collectives hang if models differ
            self._check(module, arguments, group)
        super().__init__(module, **arguments)
        if self._gradients is not None:
            self._gradients.open()

    def _check(self, module: nn.Module, arguments: dict[str, Any], group: Group) -> None:
        """Raise InvalidInput if ranks' models differ, or `method` does not support an argument."""
        for name, hint in OF_TORCH_ALONE.items():
            # `is not None`, because an argument may be a tensor, which has no truth value
            if arguments.get(name) is not None and not self._method.uses_torch_reducer:
                raise InvalidInput(name, "requires exchange='allreduce'", hint=hint)
        parameters = list(module.parameters())
        # skip modules for which DistributedDataParallel raises its own error
        refused = any(map(is_lazy, parameters)) or not any(p.requires_grad for p in parameters)
        if arguments.get("init_sync", True) and not refused:
            ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            # compare the ranks' buffers, too, if DDP's constructor broadcasts them from rank 0
            sends_buffers = arguments.get("forward_sync_buffers") is not None
            sends_buffers |= arguments.get("broadcast_buffers") in (None, True)
            check_same(module, group, set(ignored), sends_buffers)

    def _ddp_init_helper(self, *arguments: Any) -> None:
        """Create the reducer and logger; overrides the method that DDP's constructor calls."""
        ignored = self.parameters_to_ignore
        parameters = [p for name, p in self.module.named_parameters() if name not in ignored]
        self._trainable = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        self._types = [p.dtype for p in self._trainable]
        self._tuner: ChunkTuner | None = None
        if self._is_alone or not self._method.uses_torch_reducer:
            self.reducer, self.logger = None, DDPLogger()
        if self._is_alone:
            return
        if self._method.uses_torch_reducer:
            super()._ddp_init_helper(*arguments)
        if self._gradients is None:
            self._gradients = self._create_reducer(self._method, *arguments[:2])
        if isinstance(self._gradients, Reducer):
            self.reducer, self._tuner = self._gradients, self._gradients.tuner
            self._gradients.record(self._reducer_recorder)
            # as in torch's _ddp_init_helper, which is not called here
            self._passing_sync_batchnorm_handle(self.module)
        else:
            self._gradients.register(self.reducer, self._reducer_recorder)
        if self._end is not None:
            self._end.detach()  # so that it no longer keeps the former reducer in memory
        self._end = weakref.finalize(self, self._gradients.close)
        self._end.atexit = False  # not at interpreter exit, when `close` could wait for lost ranks

    def _create_reducer(
        self, method: Method, parameters: Sequence[nn.Parameter], is_sparse: Sequence[bool]
    ) -> Reducer | TorchAllReduce:
        named = trainable(self.module, parameters)
        join, exchanged = weakly(self._join), weakly(self._exchanged)
        make, chunk, as_views = method.make, method.chunk, self.gradient_as_bucket_view
        if make is None:
            # pass `exchanged` only if it has an effect, because it costs a hook on each parameter
            watched = exchanged if self._tries else None
            return TorchAllReduce(method, named, join, watched)
        if self._use_python_reducer:
            # with this mode, torch.compile puts torch's own all-reduce into the backward pass
            field = "torch._dynamo.config.optimize_ddp"
            problem = "must not be 'python_reducer'"
            raise InvalidInput(field, problem, hint="or use exchange='allreduce'")
        sparse = {id(p) for p, flag in zip(parameters, is_sparse, strict=True) if flag}
        layers = {one.layer for one in named if id(one.parameter) not in sparse}
        return Reducer(
            named,
            lambda group: make(group, as_views),
            join,
            chunk(max(1, len(layers))) if callable(chunk) else chunk,
            sparse=[i for i, one in enumerate(named) if id(one.parameter) in sparse],
            find_unused_parameters=self.find_unused_parameters,
            on_exchanged=exchanged,
        )

    def _join(self) -> Group:
        if self._group is None:  # a copy by deepcopy or pickle connects only in its first exchange
            self._group = joined(self.device, self._deadline_s, self.process_group)
        return self._group

    def _exchanged(self) -> None:
        """Do nothing; a subclass may override this method, which is called after each exchange."""

    @torch.compiler.disable(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DDP's forward pass or, with a single process, only the module's."""
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
        # an activation checkpoint's forward pass, which runs in backward, begins no step
        if torch.is_grad_enabled() and not in_backward():
            self._before_forward()
        # DDP may broadcast buffers here: if a rank is lost meanwhile, let the error name that rank
        names_lost = self._group is not None and not self._method.uses_torch_reducer
        try:
            with self._join().naming_lost_ranks() if names_lost else nullcontext():
                return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if UNFINISHED in str(error):
                self.logger.set_error_and_log(str(error))
                raise Unfinished(str(error)) from error
            raise

    def _before_forward(self) -> None:
        """Replace the reducer if parameters were frozen or unfrozen, or changed their dtype.

        If all parameters are frozen now, torch's reducer is kept.
        """
        has_changed = any(parameter.requires_grad for parameter in self._frozen)
        if isinstance(self._gradients, TorchAllReduce):
            trained = [parameter.requires_grad for parameter in self._trainable]
            has_changed |= any(trained) and not all(trained)
        else:
            has_changed |= [parameter.dtype for parameter in self._trainable] != self._types
        if has_changed:
            self._replace_reducer()

    @torch.compiler.disable
    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self._gradients is not None:
            tensors = [one for one in _find_tensors(output) if isinstance(one, Tensor)]
            self._gradients.forwarded(tensors, self.require_backward_grad_sync)
        return super()._post_forward(output)

    def _replace_reducer(self, prepared: Reducer | TorchAllReduce | None = None) -> None:
        """Use reducer `prepared`, or create one for the parameters that are trainable now.

        A created reducer connects to other ranks in its first exchange; `prepared` is connected.
        """
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = prepared
        self._rebuild()

    def _rebuild(self) -> None:
        """Create the reducer again, with the user's settings and communication hooks."""
        self.reducer = None  # free the old reducer first: two reducers would hook every gradient
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, sparse, names, self.static_graph)
        if self.static_graph and self.reducer is not None:
            self.reducer._set_static_graph()
            self._static_graph_delay_allreduce_enqueued = False
        for hook, state in self._comm_hooks:
            _register_comm_hook(self.reducer, state, hook)
        if isinstance(self._gradients, TorchAllReduce):
            self._gradients.after_next_exchange(weakly(self._rebuild_buckets))

    def _rebuild_buckets(self) -> None:
        """Let torch's new reducer rebuild its buckets directly after an exchange.

        By itself, torch rebuilds buckets in the next forward pass, with a collective. But this pass
        may be an evaluation on a single rank, which would hang. Within join(), nothing is done
        here, because ranks without samples expect the rebuild in the next forward pass.
        """
        if self.reducer is not None and not self._join_config.enable:
            self.reducer._rebuild_buckets()

    def _set_static_graph(self) -> None:
        try:
            super()._set_static_graph()
        except RuntimeError as error:
            self.logger.set_error_and_log(str(error))
            raise

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that DDP's join() runs on a rank that has no samples left."""
        hook = super().join_hook(**kwargs)
        gradients = self._gradients
        return _JoinHook(self, hook, gradients) if isinstance(gradients, Reducer) else hook

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook; raises InvalidInput unless torch's reducer is used."""
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

    def _update_process_group(self, new_process_group: Any) -> None:
        self._require_torch_reducer("_update_process_group", hint="or wrap the module again")
        super()._update_process_group(new_process_group)

    def _refuse_hooks(self, what: str) -> None:
        if not self._is_alone:
            self._require_torch_reducer(what)

    def _require_torch_reducer(self, what: str, hint: str = "") -> None:
        if not self._method.uses_torch_reducer:
            problem = f"requires exchange='allreduce', not {self._method.name!r}"
            raise InvalidInput(what, problem, hint=hint)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if isinstance(self.logger, DDPLogger):
            return self.logger.data(self)
        found: dict[str, Any] = super()._get_ddp_logging_data()
        return found

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
        is_ours = all(name.startswith("module.") for name in names)
        # Add the prefix "module." if the state was saved from the unwrapped module: then a name
        # lacks the prefix, or the unwrapped module itself has all names in a submodule "module".
        if not is_ours or self.module.state_dict(keep_vars=True).keys() >= set(names):
            for name in names:
                state[f"{prefix}module.{name}"] = state.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy: all except process groups, reducer, logger, recorder."""
        if not self._is_alone:
            self._check_default_group()
        of_process = {"process_group", "reducer", "logger", "_group", "_gradients", "_tuner"}
        of_process |= {"_trainable", "_frozen", "_types", "_reducer_recorder", "_end"}
        return {name: value for name, value in self.__dict__.items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or deep copy, which connects to other ranks in its first exchange."""
        self._group = None
        if not state["_is_alone"]:
            super().__setstate__(state)
            return
        nn.Module.__setstate__(self, state)
        self.process_group = dist.ProcessGroup(HashStore(), 0, 1)
        self._ddp_init_helper()

    def prepare(self, run: Callable[[], None]) -> None:
        """Let torch's reducer, if it is used, rebuild its buckets by a call of `run`.

        `run`: runs a forward and backward pass, and discards the gradients.
        """
        if not self._is_alone and self._method.uses_torch_reducer:
            state = self.exchange_state()
            run()
            self.load_exchange_state(state)

    def exchange_state(self) -> dict[str, Tensor]:
        """Return this rank's error feedback by key, for `load_exchange_state`."""
        return {} if self._gradients is None else self._gradients.state()

    def load_exchange_state(self, state: dict[str, Tensor]) -> None:
        """Load this rank's saved `exchange_state`; the number of ranks must not have changed."""
        if self._gradients is not None:
            self._gradients.load_state(state)

    def record(self, recorder: Recorder | None) -> None:
        """Record all exchanges from now on; None stops recording.

        Creates torch's reducer again, because it has a communication hook only while recording.
        The hook costs another pass over all gradients.
        """
        before, self._reducer_recorder = self._reducer_recorder, recorder
        if isinstance(self._gradients, Reducer):
            self._gradients.record(recorder)
        elif self._gradients is not None and before is not recorder:
            self._rebuild()

    def statistics(self) -> Statistics:
        """Return the traffic and time of all exchanges so far, on this rank."""
        return self._gradients.statistics() if self._gradients else NONE

    def close(self) -> None:
        """Stop all exchanges, and free memory and threads; the module remains usable."""
        if self._gradients is not None:
            self._gradients.close()
        # without a reducer, gradients are not averaged
        self.reducer = self._gradients = None
        self._is_alone = True


class _JoinHook(JoinHook):
    """Lets a rank that has no samples left within join() take part in other ranks' exchanges."""

    def __init__(self, parallel: Synchronized, of_torch: JoinHook, reducer: Reducer) -> None:
        self._parallel, self._reducer = parallel, reducer
        # torch's post_hook: the last rank that still had samples sends its model to all ranks
        self.post_hook = of_torch.post_hook  # type: ignore[method-assign]

    def main_hook(self) -> None:
        """Join the collectives of the other ranks' next forward and backward pass."""
        parallel = self._parallel
        parallel._check_and_sync_module_buffers()
        synchronizes = parallel._check_global_requires_backward_grad_sync(is_joined_rank=True)
        parallel.require_forward_param_sync = synchronizes
        if synchronizes:
            self._reducer.shadow()
