"""What a rank does when it has no samples left, and others have (DistributedDataParallel.join)."""

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel


class Shadow(JoinHook):
    """Takes part in the exchanges of the ranks that still have samples, as torch's hook does.

    `of_torch` is that hook, and `exchange` takes part in one exchange without any gradients.
    """

    def __init__(
        self, parallel: DistributedDataParallel, of_torch: JoinHook, exchange: Callable[[], None]
    ) -> None:
        self._parallel, self._of_torch, self._exchange = parallel, of_torch, exchange

    def main_hook(self) -> None:
        """Do what one forward and backward pass of the others asks of this rank."""
        parallel = self._parallel
        parallel._check_and_sync_module_buffers()
        synchronizes = parallel._check_global_requires_backward_grad_sync(is_joined_rank=True)
        parallel.require_forward_param_sync = synchronizes
        if synchronizes:
            self._exchange()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that was there until the end."""
        self._of_torch.post_hook(is_last_joiner)
