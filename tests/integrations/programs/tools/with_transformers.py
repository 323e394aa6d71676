"""Cases of the Transformers Trainer, which trains with Paceline and with DDP."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from paceline.integrations.transformers import with_paceline
from pair import case, cases, distance, error_of, exchange_of, main, wraps

NUMBERS, LENGTH = 16, 8


def samples() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(NUMBERS, (32, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(**options: Any) -> Trainer:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=NUMBERS, **sizes, **drop, bos_token_id=None, eos_token_id=None)
    quiet = {"report_to": "none", "disable_tqdm": True}
    options = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        **options,
    }
    arguments = TrainingArguments("runs", use_cpu=True, **quiet, **options)
    return Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=samples(), eval_dataset=samples()[:4]
    )


def beside_ddp(**options: Any) -> dict[str, Any]:
    ours, theirs = with_paceline(trainer_of(**options), exchange="host"), trainer_of(**options)
    losses = [trainer.train().training_loss for trainer in (ours, theirs)]
    return {
        "worst": distance(ours.model, theirs.model),
        "loss": abs(losses[0] - losses[1]),
        **exchange_of(ours.model_wrapped),
    }


cases(
    accumulated=lambda: beside_ddp(
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2
    ),
)


@case
def evaluated_before() -> dict[str, Any]:
    """An evaluation prepares the model unwrapped; training must still wrap it."""
    trainer, other = with_paceline(trainer_of()), trainer_of()
    trainer.evaluate()
    for one in (trainer, other):
        one.train()
    found = {"wraps": wraps(trainer.model_wrapped), "worst": distance(trainer.model, other.model)}
    trainer.train()
    return {**found, "again": wraps(trainer.model_wrapped)}


@case
def resumed_from_a_checkpoint() -> dict[str, Any]:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = with_paceline(trainer_of(**saving))
    whole.train()
    rest = with_paceline(trainer_of())
    moved = distance(rest.model, whole.model)
    rest.train(resume_from_checkpoint="runs/checkpoint-3")
    return {"moved": moved, "worst": distance(rest.model, whole.model)}


@case
def refused() -> dict[str, Any]:
    many = trainer_of()
    many.args._n_gpu = 2
    other = with_paceline(trainer_of())
    other.create_accelerator_and_postprocess()
    attempts = [
        lambda: with_paceline(many),
        lambda: other.train(),
        lambda: with_paceline(trainer_of(), find_unused_parameters=False),
    ]
    return {"errors": [error_of(attempt) for attempt in attempts]}


main()
