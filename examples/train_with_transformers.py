"""Transformers' Trainer with Paceline: torchrun --nproc-per-node 2 train_with_transformers.py.

A small GPT-2 with random weights learns how sequences of numbers go on.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from paceline.integrations.transformers import with_paceline

NUMBERS, LENGTH = 16, 12
torch.manual_seed(0)
first, step = torch.randint(NUMBERS, (2, 256, 1))
sequences = (first + step * torch.arange(LENGTH)) % NUMBERS
samples = [{"input_ids": row, "labels": row} for row in sequences]

config = GPT2Config(
    vocab_size=NUMBERS,
    n_positions=LENGTH,
    n_embd=64,
    n_layer=2,
    n_head=2,
    bos_token_id=None,
    eos_token_id=None,
)
arguments = TrainingArguments(
    output_dir="runs",
    use_cpu=True,
    num_train_epochs=8,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
model = GPT2LMHeadModel(config)
trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:64])
trainer = with_paceline(trainer, exchange="host")
trainer.train()

if trainer.is_world_process_zero():
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    print(f"loss {losses[0]:.4f} after the first epoch, {losses[-1]:.4f} after the last")
