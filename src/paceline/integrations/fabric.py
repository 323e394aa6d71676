"""Lightning Fabric strategy that trains with paceline.DataParallel."""

from lightning.fabric.plugins import DeepSpeedPrecision, FSDPPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.integrations.data_parallel import DataParallel


class PacelineStrategy(DDPStrategy):
    """Trains with paceline.DataParallel: `Fabric(strategy=PacelineStrategy())`.

    Starts one process per device. Accepts the arguments of DDPStrategy and paceline.DataParallel.
    After importing this module, `Fabric(strategy="paceline")` works, too.
    """

    def setup_module(self, module: nn.Module) -> DataParallel:
        """Wrap a model that is passed to `Fabric.setup`; raises InvalidInput if already wrapped."""
        if isinstance(module, DataParallel):
            problem = "is already a paceline.DataParallel"
            raise InvalidInput("model", problem, hint="pass the unwrapped model to Fabric.setup")
        if isinstance(self.precision, DeepSpeedPrecision | FSDPPrecision):
            raise InvalidInput(
                "precision",
                f"is {type(self.precision).__name__}, which requires a sharded model",
                hint="set the precision by a name, such as Fabric(precision='bf16-mixed')",
            )
        return DataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)


STRATEGY_REGISTRY.register(
    "paceline", PacelineStrategy, description="DDP by paceline.DataParallel", override=True
)
