"""GPTs of 0.1, 1 and 10 million parameters on the text of Python's standard library."""

import sys
from functools import partial
from pathlib import Path

from torch.utils.data import Subset

from paceline.training.data.text import load_text
from paceline.training.models.transformers import GPT
from paceline.training.recipes.losses import bits_per_byte, next_token_loss
from paceline.training.recipes.recipe import Recipe


def _recipe(context: int, width: int, layers: int, heads: int, num_tested: int) -> Recipe:
    data = load_text("", (context,), seed=0)
    sizes = {"context": context, "width": width, "num_layers": layers, "num_heads": heads}
    return Recipe(
        model=partial(GPT, data.num_classes, **sizes),
        train=data.train,
        test=Subset(data.test, range(min(num_tested, len(data.test)))),
        loss=next_token_loss,
        score=bits_per_byte,
        num_classes=data.num_classes,
        name=f"GPT of width {width}",
    )


def tiny() -> Recipe:
    """Return a GPT of 121,000 parameters; the command line chooses the optimizer."""
    return _recipe(64, 64, 2, 2, 2048)


def small() -> Recipe:
    """Return a GPT of a million parameters."""
    return _recipe(128, 160, 3, 4, 512)


def large() -> Recipe:
    """Return a GPT of ten million parameters."""
    return _recipe(128, 384, 6, 6, 256)


def test_loss(model: str, *options: object, steps: int, seed: int) -> float:
    """Train one of these GPTs with AdamW and cosine schedule; return its test loss."""
    from command import paceline  # not importable where `paceline train` loads this file

    learning = ("--optimizer=adamw", "--schedule=cosine", f"--warmup-steps={max(1, steps // 15)}")
    words = (*options, *learning, "--steps", steps, "--seed", seed, "--profile-s", 0.5)
    place = {"cwd": Path(__file__).parent}
    result = paceline("train", f"sized_gpt:{model}", *words, "--checkpoint-every=never", **place)
    loss: float = result["epochs"][-1]["test_loss"]
    print(f"{model} {' '.join(map(str, words))}: {loss:.4f}", file=sys.stderr, flush=True)
    return loss
