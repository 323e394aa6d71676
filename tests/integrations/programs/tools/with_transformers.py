"""Cases of the Transformers Trainer, which trains with Paceline and with DDP."""

from typing import Any

import torch
from tool_cases import MOVED, ROUNDING, check_exchange, distance, exchange_of, wraps
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from paceline.integrations.transformers import with_paceline
from refusals import refused as refuses

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


def accumulated() -> None:
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    ours, theirs = with_paceline(trainer_of(**options), exchange="host"), trainer_of(**options)
    losses = [trainer.train().training_loss for trainer in (ours, theirs)]
    assert distance(ours.model, theirs.model) <= ROUNDING
    assert abs(losses[0] - losses[1]) <= ROUNDING
    check_exchange(exchange_of(ours.model_wrapped), 6)


def evaluated_before() -> None:
    """An evaluation prepares the model unwrapped; training must still wrap it."""
    trainer, other = with_paceline(trainer_of()), trainer_of()
    trainer.evaluate()
    for one in (trainer, other):
        one.train()
    assert wraps(trainer.model_wrapped) == ["DataParallel"]
    assert distance(trainer.model, other.model) <= ROUNDING
    trainer.train()
    assert wraps(trainer.model_wrapped) == ["DataParallel"]


def resumed_from_a_checkpoint() -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = with_paceline(trainer_of(**saving))
    whole.train()
    rest = with_paceline(trainer_of())
    assert distance(rest.model, whole.model) >= MOVED
    rest.train(resume_from_checkpoint="runs/checkpoint-3")
    assert distance(rest.model, whole.model) <= ROUNDING


def refused() -> None:
    many = trainer_of()
    many.args._n_gpu = 2
    other = with_paceline(trainer_of())
    other.create_accelerator_and_postprocess()
    with refuses("trainer"):
        with_paceline(many)
    with refuses("trainer"):
        other.train()
    with refuses("find_unused_parameters"):
        with_paceline(trainer_of(), find_unused_parameters=False)
