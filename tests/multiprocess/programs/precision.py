"""Cases of numbers that are small, mixed, or none."""

import torch
from graphs import Net
from torch import Tensor, nn

from ranks import Place, all_nan, batch, bits, case, quick, settled, sgd, square, trained


@case
def nan_on_one_rank(place: Place):
    module, _ = place.build(Net)
    parallel = place.parallel(module)
    optimizer = sgd(parallel)
    for step in range(4):
        optimizer.zero_grad()
        loss = square(parallel, place.rank, step)
        (loss * (float("nan") if step == 1 and place.rank == 1 else 1.0)).backward()
        optimizer.step()
    return {"nan": all_nan(parallel.parameters())}


def _scaled(place: Place, dtype: torch.dtype | None):
    """Train with a GradScaler; rank 1 overflows in step 1, which nobody must take."""
    make = Net if dtype is None else lambda: Net().float()
    module, oracle = place.build(make)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    number = torch.float64 if dtype is None else torch.float32
    scales, skipped = [], []

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return model(batch(rank, step, dtype=number)).float().square().mean()

    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        overflows = step == 1 and place.rank == 1
        scaled = scaler.scale(loss(parallel, place.rank, step))
        (scaled * (float("inf") if overflows else 1.0)).backward()
        before = bits(parallel)
        scaler.step(optimizers[0])
        scaler.update()
        scales.append(scaler.get_scale())
        skipped.append(before == bits(parallel))
        if step != 1:
            place.mean(loss, oracle, step).backward()
            optimizers[1].step()
    return settled(parallel, oracle, scales=scales, skipped=skipped)


@quick
def grad_scaler(place: Place):
    return _scaled(place, None)


@quick
def grad_scaler_with_float16_autocast(place: Place):
    return _scaled(place, torch.float16)


@case
def bfloat16_autocast(place: Place):
    module, _ = place.build(lambda: Net().float())
    parallel = place.parallel(module)
    optimizer = sgd(parallel)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = parallel(batch(place.rank, step, dtype=torch.float32)).float().square().mean()
        loss.backward()
        optimizer.step()
    return {"bits": bits(parallel)}


@case
def float32_and_bfloat16(place: Place):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6).bfloat16()
            self.c = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).bfloat16()).float())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step, dtype=torch.float32)).square().mean()

    return trained(place, Mixed, loss)
