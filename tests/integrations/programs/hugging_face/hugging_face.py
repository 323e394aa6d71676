"""Train small Hugging Face models with random weights in the usual loop.

The reference "alone" is one process with the samples of all ranks. Dropout is off, because one
process and two ranks draw different masks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from declared import program
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from steps import module_of
from trial import Trial

HF: dict[str, Any] = {"counts": False, "deadline_s": 60.0}
STEPS = 4
WORDS = 50
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}

Batch = dict[str, Tensor]


def _words(trial: Trial, step: int) -> Tensor:
    """Return four sequences of seven words."""
    return trial.share(step, 4, 7).mul(100).long().abs() % WORDS


def _language(trial: Trial, step: int) -> Batch:
    """Return a batch like the collator for causal language models."""
    ids = _words(trial, step)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def with_lora(module: nn.Module, targets: list[str], **more: Any) -> nn.Module:
    config = LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, **more)
    return get_peft_model(module, config).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Use a large epsilon, because some attention gradients are zero except for rounding."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def _trained(
    trial: Trial,
    module: nn.Module,
    batch_of: Callable[[Trial, int], Batch] = _language,
    **options: Any,
) -> Iterator[Any]:
    """Train in the usual loop, with clipping and a schedule."""
    model = trial.wrap(module, **options)
    optimizer = adam(model)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 10)
    for step in range(STEPS):
        model.train()
        outputs = model(**batch_of(trial, step))
        outputs.loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield {"norm": norm, "kind": type(outputs).__name__}
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():  # ranks evaluate different samples
            model(**batch_of(trial, 100 + step))


@program(**HF)
def gpt2_with_lora_and_reentrant_gradient_checkpointing(trial):
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=8, vocab_size=WORDS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config)
    module.gradient_checkpointing_enable({"use_reentrant": True})
    module.enable_input_require_grads()  # layers before the first adapter are frozen
    yield from _trained(trial, with_lora(module, ["c_attn"]))


@program(**HF)
def llama_with_tied_embeddings_lora_and_a_saved_norm(trial):
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=1, vocab_size=WORDS, max_position_embeddings=8,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    adapted = with_lora(module, ["q_proj", "v_proj"], modules_to_save=["norm"])
    yield from _trained(trial, adapted)


@program(**HF)
def bert_with_a_pooler_that_nobody_uses(trial):
    """Use a custom head on the last hidden state; the pooler's gradients stay None."""
    config = transformers.BertConfig(
        **SIZES, vocab_size=WORDS, max_position_embeddings=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    @module_of(bert=transformers.BertModel(config), head=nn.Linear(16, 3))
    def tagger(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.bert(input_ids=input_ids).last_hidden_state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.TokenClassifierOutput(loss=loss, logits=logits)

    def tagged(trial: Trial, step: int) -> Batch:
        ids = _words(trial, step)
        return {"input_ids": ids, "labels": ids % 3}

    yield from _trained(trial, tagger.double(), tagged, find_unused_parameters=True)


@program(**HF)
def t5_with_two_stacks(trial):
    """Train an encoder and a decoder that share an embedding."""
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=WORDS,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip

    def translated(trial: Trial, step: int) -> Batch:
        ids = _words(trial, step)
        return {"input_ids": ids, "labels": ids.flip(1)}

    module = transformers.T5ForConditionalGeneration(config).double()
    yield from _trained(trial, module, translated)
