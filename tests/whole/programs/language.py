"""Train a small language model with strategy wheel, and with plain SGD in this process.

    python language.py RECIPE SETTINGS   one worker with one lane

A sample is a mapping, which is both inputs and targets. The loss has a term for the next tokens and
one for a number per sentence. Worker processes import the recipe from this file.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from turning import SEED, Quiet, session_of, trained

from paceline.training.recipes.recipe import Recipe

VOCABULARY, LENGTH, WIDTH = 800, 6, 8
SAMPLES, BATCH, RATE, MOMENTUM = 120, 12, 0.5, 0.5


class Block(nn.Module):
    """Causal attention and a linear layer, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + F.gelu(self.hidden(x))


class Language(nn.Module):
    """A usual decoder: forward checks the length and makes the positions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.to(dtype)

    def forward(self, tokens: Tensor, scale: Tensor, **unused: Tensor) -> dict[str, Tensor]:
        _, length = tokens.shape
        assert length <= LENGTH
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = x * scale[:, None, None]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"logits": logits, "sentence": logits.mean((1, 2))}


class Sentences:
    """Samples with five fields; the model receives all and uses two."""

    def __init__(self, first: int, count: int) -> None:
        generator = torch.Generator().manual_seed(first)
        self._tokens = torch.randint(VOCABULARY // 20, (count, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens[index]
        return {
            "tokens": tokens[:-1],
            "next": tokens[1:],
            "scale": 1 + tokens[0] / VOCABULARY,
            "mood": tokens.double().mean() / VOCABULARY,
            "is_known": tokens[1:] > 0,
        }


def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of known tokens plus the squared error of the mood."""
    each = F.cross_entropy(
        outputs["logits"].flatten(0, 1), batch["next"].flatten(), reduction="none"
    )
    of_tokens = (each * batch["is_known"].flatten()).mean()
    return of_tokens + (outputs["sentence"] - batch["mood"]).square().mean()


def recipe_with(dtype: torch.dtype) -> Recipe:
    return Recipe(
        model=lambda: Language(dtype),
        train=Sentences(1, SAMPLES),
        test=Sentences(2, 20),
        loss=loss,
        name="language",
    )


def double() -> Recipe:
    return recipe_with(torch.float64)


def single() -> Recipe:
    return recipe_with(torch.float32)


class Counting(Quiet):
    """Progress that also counts the tests within epochs."""

    score = "loss"
    tests = 0

    def evaluation(self, found, score: str) -> None:
        self.tests += 1


def in_one_piece(recipe: Recipe, settings) -> dict[str, Tensor]:
    from paceline.training.data import ShardedBatches

    torch.manual_seed(SEED)
    model = recipe.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    batches = ShardedBatches(len(recipe.samples), BATCH, 0, 1, SEED)
    is_bfloat16 = settings.precision == "bfloat16"
    for step in range(settings.steps):
        epoch, first = divmod(step, len(batches))
        batches.set_epoch(epoch, first)
        batch = recipe.samples.__getitems__(next(iter(batches)))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            value = recipe.loss(model(**batch), batch)
        optimizer.zero_grad()
        value.backward()
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
    return model.state_dict()


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    torch.set_num_threads(1)
    model, more = sys.argv[1], json.loads(sys.argv[2])
    settings = {"batch_size": BATCH, "learning_rate": RATE, "momentum": MOMENTUM} | more
    config = {"workers": 1, "lanes": 1, "staleness": 0}
    session = session_of(f"language:{model}", Counting(), settings, **config)
    found, own = trained(session)
    other = in_one_piece(globals()[model](), session.settings)
    found["same"] = {key: torch.equal(own[key], other[key]) for key in other}
    found["error"] = max(float((own[key] - other[key]).abs().max()) for key in other)
    found["moved"] = float((own["head.weight"]).abs().max())
    found["tests"] = session.progress.tests
    print(json.dumps(found))


if __name__ == "__main__":
    main()
