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
        """Wrap the model given to `Fabric.setup`."""
        if isinstance(module, DataParallel):
            raise InvalidInput("model", "is already a DataParallel", hint="pass its module")
        if isinstance(self.precision, DeepSpeedPrecision | FSDPPrecision):
            raise InvalidInput(
                "precision",
                f"is {type(self.precision).__name__}, which requires a sharded model",
                hint="use Fabric(precision=...)",
            )
        return DataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)


STRATEGY_REGISTRY.register(
    "paceline", PacelineStrategy, description="DDP by paceline.DataParallel", override=True
)
