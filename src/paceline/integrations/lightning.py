"""Lightning Trainer strategy for paceline.DataParallel, and callback for LocalUpdates."""

from math import isfinite
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import InvalidInput
from paceline.exchange.local_updates import LocalUpdates
from paceline.integrations.data_parallel import DataParallel, check_hook


class PacelineStrategy(DDPStrategy):
    """Trains with paceline.DataParallel: `Trainer(strategy=PacelineStrategy())`.

    Starts one process per device. Accepts the arguments of DDPStrategy and paceline.DataParallel.
    After importing this module, `Trainer(strategy="paceline")` works, too.

    Unlike DDPStrategy, registers communication hooks on CPUs, too. Raises InvalidInput for a hook
    that the exchange does not support.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._ddp_comm_hook is not None:
            check_hook("ddp_comm_hook", self._ddp_kwargs.get("exchange", "auto"))
        elif self._ddp_comm_wrapper is not None or self._ddp_comm_state is not None:
            problem = "must be set if ddp_comm_state or ddp_comm_wrapper is set"
            raise InvalidInput("ddp_comm_hook", problem)
        averages = isinstance(self._ddp_comm_state, PostLocalSGDState)
        if self._model_averaging_period is not None and not averages:
            raise InvalidInput(
                "model_averaging_period", "requires a PostLocalSGDState as ddp_comm_state"
            )

    def setup(self, trainer: Trainer) -> None:
        """Wrap the LightningModule in paceline.DataParallel, and create its optimizers."""
        if isinstance(self.precision_plugin, DeepSpeedPrecision | FSDPPrecision):
            raise InvalidInput(
                "precision",
                f"is {type(self.precision_plugin).__name__}, which requires a sharded model",
                hint="set the precision by a name, such as Trainer(precision='bf16-mixed')",
            )
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DataParallel:
        return DataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is None:
            return
        hook, wrap = self._ddp_comm_hook, self._ddp_comm_wrapper
        assert isinstance(self.model, DataParallel)
        self.model.register_comm_hook(self._ddp_comm_state, wrap(hook) if wrap else hook)

    def teardown(self) -> None:
        """Stop averaging gradients, and unwrap the LightningModule."""
        if isinstance(self.model, DataParallel):
            self.model.close()
            self.model = self.lightning_module
        super().teardown()


StrategyRegistry.register(
    "paceline", PacelineStrategy, description="DDP by paceline.DataParallel", override=True
)


class LocalUpdatesCallback(Callback):
    """Trains with LocalUpdates: `Trainer(callbacks=[LocalUpdatesCallback(sync_every=50)])`.

    Accepts the options of LocalUpdates; `num_steps` defaults to the trainer's estimate of the
    number of steps. During training, the module runs without DistributedDataParallel, and Lightning
    does not broadcast in every step whether a worker has received SIGTERM. A checkpoint contains
    only the first worker's state; any number of workers can resume from the checkpoint.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._updates: LocalUpdates | None = None
        self._wrapped: nn.Module | None = None
        self._loaded: dict[str, Any] = {}  # state from a checkpoint, which training loads at start
        self._final: dict[str, Any] = {}  # state after training, for a checkpoint saved at the end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create LocalUpdates for the model and optimizers, with a checkpoint's state if any."""
        strategy, total = trainer.strategy, trainer.estimated_stepping_batches
        options = {"num_steps": int(total) if isfinite(total) else None} | self._options
        assert strategy.model is not None
        if isinstance(strategy.model, DistributedDataParallel):
            # Use the model without DDP: Lightning's manual optimization would turn on DDP's
            # exchange of gradients in each step.
            self._wrapped, strategy.model = strategy.model, pl_module
        self._updates = LocalUpdates(strategy.model, trainer.optimizers, **options)
        if self._loaded:
            self._updates.load_state_dict(self._loaded)
            self._loaded = {}
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the last changes, so that all workers end with the same parameters."""
        if self._updates is not None:
            self._updates.close()
            self._final = self._updates.state_dict()
        self._restore(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End LocalUpdates without waiting for other workers."""
        if self._updates is not None:
            self._updates.__exit__(type(exception), exception, exception.__traceback__)
        self._restore(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker's LocalUpdates."""
        return self._final if self._updates is None else self._updates.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state from a checkpoint until training starts, which loads it."""
        self._loaded = state_dict

    def _restore(self, trainer: Trainer) -> None:
        """Restore what `on_train_start` has changed: the wrapped model, and SIGTERM broadcasts."""
        if self._wrapped is not None:
            trainer.strategy.model = self._wrapped
        loop: Any = trainer.fit_loop.epoch_loop
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        self._updates = self._wrapped = None
