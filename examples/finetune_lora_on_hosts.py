"""LoRA on hosts of unequal speed, a process each, under torchrun: docs/how-to/lora.md.

A small GPT-2 with random weights learns how sequences of numbers go on; put yours in its place.
"""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from paceline.integrations.transformers import LocalUpdatesCallback

parser = argparse.ArgumentParser()
parser.add_argument("--sync-every", type=int, default=20, help="steps that this host takes a round")
parser.add_argument("--batch-size", type=int, default=8, help="samples of a step on this host")
parser.add_argument("--rounds", type=int, default=10, help="rounds; the same on all hosts")
parser.add_argument("--resume", action="store_true", help="go on from this host's last checkpoint")
own = parser.parse_args()


class OwnSamples(Trainer):
    """A Trainer with a loader for each host; its own one gives all hosts as many samples."""

    def get_train_dataloader(self) -> DataLoader:
        """Return batches in an order that differs between hosts."""
        order = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
        return DataLoader(
            self.train_dataset,
            self.args.per_device_train_batch_size,
            shuffle=True,
            generator=order,
            collate_fn=self.data_collator,
        )


NUMBERS, LENGTH = 16, 12
torch.manual_seed(0)
first, step = torch.randint(NUMBERS, (2, 256, 1))
rows = (first + step * torch.arange(LENGTH)) % NUMBERS
samples = [{"input_ids": row, "labels": row} for row in rows]
sizes = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=NUMBERS, **sizes, bos_token_id=None, eos_token_id=None)
)
lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)

arguments = TrainingArguments(
    output_dir="runs/lora",
    use_cpu=not torch.cuda.is_available(),
    max_steps=own.rounds * own.sync_every,
    per_device_train_batch_size=own.batch_size,
    learning_rate=1e-2,
    logging_strategy="no",
    save_steps=own.sync_every,  # in each round, like the other hosts
    save_on_each_node=True,
    ignore_data_skip=True,
    label_names=["labels"],
    report_to="none",
    disable_tqdm=True,
)
updates = LocalUpdatesCallback(
    sync_every=own.sync_every, weight=float(own.batch_size), codec="dynamic4"
)
trainer = OwnSamples(
    get_peft_model(model, lora),
    arguments,
    train_dataset=samples,
    eval_dataset=samples,
    callbacks=[updates],
)
trainer.train(resume_from_checkpoint=own.resume or None)

loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"loss {loss:.4f} after {own.rounds} rounds")
