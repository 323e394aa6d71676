"""A GPT of 121,000 parameters on the text of Python's standard library, for runs of a minute."""

from functools import partial

from paceline.data.text import load_text
from paceline.models.transformers import GPT
from paceline.recipes.losses import bits_per_byte, next_token_loss
from paceline.recipes.recipe import Recipe

CONTEXT = 64


def recipe() -> Recipe:
    """Return the recipe, without an optimizer: the command line names it."""
    data = load_text("", (CONTEXT,), seed=0)
    return Recipe(
        model=partial(GPT, data.num_classes, context=CONTEXT, width=64, num_layers=2, num_heads=2),
        train=data.train,
        test=data.test,
        loss=next_token_loss,
        score=bits_per_byte,
        num_classes=data.num_classes,
        name="small GPT",
    )
