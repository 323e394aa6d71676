"""Fine-tuning of a GPT-2's adapters on the first of two hosts, and on both."""

import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from slow_host import SLOWER, train
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import paceline
from paceline.links.group import Group
from paceline.training.data.text import load_text
from paceline.training.recipes.losses import next_token_loss

_CONTEXT, _BATCH_SIZE = 128, 8
_NUM_BASE_STEPS, _NUM_ROUNDS, _SYNC_EVERY, _REPEATS = 200, 5, 40, 3
_NUM_EXCHANGES, _NUM_TESTED = 5, 64
_HEADERS = str(Path(torch.__file__).parent / "include" / "ATen" / "core")


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the runs' tokens, seconds and losses, and an exchange's bytes and seconds."""
    base = _base(10 if quick else _NUM_BASE_STEPS)
    data = load_text(_HEADERS, (_CONTEXT,), seed=0)
    assert data.test is not None
    tested = torch.stack([data.test[row][0] for row in range(min(_NUM_TESTED, len(data.test)))])
    runs: dict[str, list[dict[str, float]]] = {"the fast host alone": [], "both": []}
    for seed in range(1 if quick else _REPEATS):
        for name, own in runs.items():
            is_alone = name != "both"
            group.barrier()
            if group.rank == 0 or not is_alone:
                every = 4 if quick else _SYNC_EVERY
                model, figures = _run(base, data.train, group, is_alone, seed, every)
                own.append({**figures, "loss": _loss(model, tested)})
    group.barrier()
    kinds = {"adapters, dynamic4": (True, "dynamic4"), "adapters": (True, None)}
    kinds["whole model"] = (False, None)
    exchanges = {name: _exchange(base, *kind) for name, kind in kinds.items()}
    return {"runs": runs, "exchanges": exchanges, "before": _loss(base, tested)}


def _base(num_steps: int) -> nn.Module:
    """Return a GPT-2 that has learned some of the text of Python's library; the same everywhere."""
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
    torch.manual_seed(0)
    lora = LoraConfig(r=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model: nn.Module = get_peft_model(copy.deepcopy(base), lora)
    return model


def _run(
    base: nn.Module,
    samples: Dataset[Any],
    group: Group,
    is_alone: bool,
    seed: int,
    sync_every: int,
) -> tuple[nn.Module, dict[str, float]]:
    """Fine-tune; return the model, and the tokens of all and the seconds of this host."""
    model, is_slow = _adapted(base), group.rank > 0
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), 3e-3)
    own_every = sync_every // (SLOWER if is_slow else 1)
    num_steps = _NUM_ROUNDS * own_every
    updates = (
        nullcontext()
        if is_alone
        else paceline.LocalUpdates(
            model, optimizer, own_every, codec="dynamic4", num_steps=num_steps, weight=1.0
        )
    )
    batches = _batches(samples, 2 * seed + group.rank)
    started_s = time.monotonic()
    with updates:
        train(batches, partial(_step, model, optimizer), num_steps, is_slow=is_slow)
    seconds = time.monotonic() - started_s
    all_steps = num_steps * (1 if is_alone else 1 + 1 / SLOWER)
    return model, {"tokens": all_steps * _BATCH_SIZE * _CONTEXT, "seconds": seconds}


def _loss(model: nn.Module, tokens: Tensor) -> float:
    with torch.no_grad():
        return float(next_token_loss(model(tokens).logits[:, :-1], tokens[:, 1:]))


def _exchange(base: nn.Module, is_adapted: bool, codec: str | None) -> dict[str, float]:
    """Return the values, bytes and seconds of an exchange of adapters, or of the whole model."""
    model = _adapted(base) if is_adapted else copy.deepcopy(base)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, 1e-6)
    seconds = []
    with paceline.LocalUpdates(model, optimizer, 1, codec=codec) as updates:
        for _ in range(_NUM_EXCHANGES):
            for one in trained:
                one.grad = torch.randn_like(one)
            started_s = time.monotonic()
            optimizer.step()
            seconds.append(time.monotonic() - started_s)
        nbytes = updates.statistics().bytes_sent // _NUM_EXCHANGES
    values = sum(one.numel() for one in trained)
    return {"values": values, "nbytes": nbytes, "seconds": median(seconds)}
