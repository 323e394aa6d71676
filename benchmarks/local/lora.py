"""Compare LoRA on two hosts, one four times slower, with the fast host alone.

A small GPT-2 learns the text of Python's library; its adapters then learn torch's C++ headers, in a
loop with PEFT and LocalUpdates, at 1 Gbit/s. The slow host runs a quarter of a round's steps.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import slow_host
import torch
from hosts import TwoHosts, on_hosts
from slow_host import ALONE, SLOWER
from torch import Tensor, nn
from torch.utils.data import Dataset

from figures import table
from paceline import LocalUpdates
from paceline.links.group import Group
from paceline.training.data.text import load_text
from paceline.training.recipes.losses import next_token_loss

_CONTEXT, _BATCH_SIZE = 128, 8
_NUM_BASE_STEPS, _NUM_ROUNDS, _SYNC_EVERY, _REPEATS = 200, 5, 40, 3
_NUM_EXCHANGES, _NUM_TESTED = 5, 64
_HEADERS = str(Path(torch.__file__).parent / "include" / "ATen" / "core")
_KINDS = {  # of exchanges: whether only adapters are exchanged, and the codec
    "adapters, dynamic4": (True, "dynamic4"),
    "adapters": (True, None),
    "whole model": (False, None),
}


def part(quick: bool) -> dict[str, Any]:
    """Measure the runs and the exchanges on two hosts at 1 Gbit/s."""
    with TwoHosts("1gbit") as hosts:
        return on_hosts(hosts, Path(__file__).parent, "lora", quick)


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the runs' tokens, seconds and losses, and each exchange's bytes and seconds."""
    base = _base(10 if quick else _NUM_BASE_STEPS)
    data = load_text(_HEADERS, (_CONTEXT,), seed=0)
    tested = torch.stack([data.test[row][0] for row in range(min(_NUM_TESTED, len(data.test)))])
    every, repeats = (4, 1) if quick else (_SYNC_EVERY, _REPEATS)
    run = partial(_run, base, data.train, tested, group, every)
    runs = slow_host.in_turns(group, (ALONE, "both"), repeats, run)
    exchanges = {name: _exchange(base, *kind) for name, kind in _KINDS.items()}
    return {"runs": runs, "exchanges": exchanges, "before": _loss(base, tested)}


def _base(num_steps: int) -> nn.Module:
    """Pretrain a GPT-2 on the text of Python's library; all hosts get the same model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": _CONTEXT, "n_embd": 256, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, **sizes, bos_token_id=None, eos_token_id=None)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = _batches(load_text("", (_CONTEXT,), seed=0).train, seed=0)
    for _, tokens in zip(range(num_steps), batches, strict=False):
        _step(model, optimizer, tokens)
    return model


def _batches(samples: Dataset[Any], seed: int) -> Iterator[Tensor]:
    order = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(samples), (_BATCH_SIZE,), generator=order)  # type: ignore[arg-type]
        yield torch.stack([samples[int(row)][0] for row in rows])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    next_token_loss(model(tokens).logits[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _adapted(base: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(copy.deepcopy(base), lora)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def _run(
    base: nn.Module,
    samples: Dataset[Any],
    tested: Tensor,
    group: Group,
    sync_every: int,
    name: str,
    seed: int,
) -> dict[str, float]:
    """Fine-tune; return the tokens of all hosts, the seconds of this host, and the loss."""
    model, is_slow = _adapted(base), group.rank > 0
    optimizer = torch.optim.AdamW(_trained(model), 3e-3)
    every = sync_every // (SLOWER if is_slow else 1)
    num_steps = _NUM_ROUNDS * every
    known: dict[str, Any] = {"codec": "dynamic4", "num_steps": num_steps, "weight": 1.0}
    updates = nullcontext() if name == ALONE else LocalUpdates(model, optimizer, every, **known)
    batches = _batches(samples, 2 * seed + group.rank)
    with updates:
        step = partial(_step, model, optimizer)
        seconds = slow_host.train(batches, step, num_steps, is_slow=is_slow)
    all_steps = num_steps * (1 if name == ALONE else 1 + 1 / SLOWER)
    tokens = all_steps * _BATCH_SIZE * _CONTEXT
    return {"tokens": tokens, "seconds": seconds, "loss": _loss(model, tested)}


def _loss(model: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        return float(next_token_loss(model(tokens).logits[:, :-1], tokens[:, 1:]))


def _exchange(base: nn.Module, is_adapted: bool, codec: str | None) -> dict[str, float]:
    """Exchange the adapters or the whole model; return values, bytes and median seconds."""
    model = _adapted(base) if is_adapted else copy.deepcopy(base)
    trained = _trained(model)
    optimizer = torch.optim.SGD(trained, 1e-6)
    seconds = []
    with LocalUpdates(model, optimizer, 1, codec=codec) as updates:
        for _ in range(_NUM_EXCHANGES):
            for one in trained:
                one.grad = torch.randn_like(one)
            started_s = time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - started_s)
        nbytes = updates.statistics().bytes_sent // _NUM_EXCHANGES
    values = sum(one.numel() for one in trained)
    return {"values": values, "nbytes": nbytes, "seconds": median(seconds)}


def text(figures: dict[str, Any]) -> str:
    """Return the tables."""
    head = ("LoRA, 4:1", "tokens/s", "times the fast host", "s", "test loss")
    exchanges = [
        (name, f"{own['values']:,}", f"{own['nbytes']:,}", f"{1e3 * own['seconds']:.1f}")
        for name, own in figures["exchanges"].items()
    ]
    of_exchange = ("exchange at 1 Gbit/s", "values", "bytes sent", "ms")
    said = f"Test loss before fine-tuning {figures['before']:.3f}."
    runs = table("", head, slow_host.lines(figures["runs"]))
    return f"{runs}\n\n{table('', of_exchange, exchanges)}\n\n{said}"
