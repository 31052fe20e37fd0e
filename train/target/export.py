"""A trained target as a Hugging Face folder with a model card."""

import copy
import math
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.common.files import replacing_files
from train.configs import TargetConfig
from train.target.model import TargetProgress


def export(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model in bf16, its config, generation config and tokenizer as a Hugging Face folder."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )

    with replacing_files(folder, last=("config.json",)) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def sample_continuations(folder: Path, prompts: list[str], new_tokens: int = 120) -> list[tuple[str, str]]:
    """Greedy answers of the exported model, loaded as a user would."""
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    samples = []
    for prompt in prompts:
        question = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
        samples.append((prompt, tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)))
    return samples


def write_card(folder: Path, config: TargetConfig, info: dict[str, Any], progress: TargetProgress, facts: dict) -> None:
    """Write the model card, from this run's own numbers."""
    shape, rows = config.model, [row for row in facts["rows"] if "heldout_loss" in row]
    every = max(1, len(rows) // 20)
    shown = [row for i, row in enumerate(rows) if i % every == 0 or i == len(rows) - 1]
    curve = "\n".join(f"| {row['step']:,} | {row['tokens']:,} | {row['heldout_loss']:.4f} |" for row in shown)
    samples = "\n".join(f"**{prompt}**\n\n~~~text\n{answer}\n~~~\n" for prompt, answer in facts["samples"])
    loss = rows[-1]["heldout_loss"]
    data, purpose, form = str(config.corpus), "It exists to draft for a larger model of the same tokenizer.", ""
    if facts["python"]:
        data = f"the source files (docstrings and code) of Python {facts['python']}'s standard library"
        purpose = """It exists so that speculative decoding can be tried and tested offline on a CPU. It is not a useful
assistant: it writes plausible Python and docstrings, and it invents facts."""
        form = " The held-out ones are about classes and functions that training never saw."
    if config.tokenizer is None:
        form += " Chat format: `<|user|>question<|assistant|>answer<|end|>`; the tokenizer's chat template writes it."
    else:
        form += f" Tokenizer and chat template are those of {config.tokenizer}."
    folder.joinpath("README.md").write_text(f"""---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, llama, code]
---
# {config.name}

A very small Llama trained from scratch on dialogues made from {data}. {purpose}

| | |
| --- | --- |
| parameters | {facts["parameters"]:,} ({2 * facts["parameters"]:,} bytes in bf16) |
| shape | {shape.layers} layers, hidden {shape.hidden_size}, {shape.heads} heads ({shape.kv_heads} kv), \
intermediate {shape.intermediate_size}, vocabulary {shape.vocab_size}, tied embeddings |
| data | {facts["dialogues"]:,} dialogues, {facts["tokens"]:,} tokens |
| trained on | {progress.tokens:,} tokens in {progress.step:,} steps ({progress.position.epoch + 1} epochs begun), \
sequences of {config.seq_len} |
| training time | {progress.seconds / 60:.1f} minutes, {config.threads} CPU threads, {platform.machine()} |
| held-out loss | {loss:.4f} nats per token (perplexity {math.exp(loss):.2f}), {facts["heldout_tokens"]:,} tokens |
| optimiser | Muon (lr {config.muon_lr}) and AdamW (lr {config.embed_lr}), warm-up, constant, linear decay |
| versions | Python {info["versions"]["python"]}, torch {info["versions"]["torch"]}, \
transformers {info["versions"]["transformers"]} |
| code commit | {info["commit"]} |

{form.strip()} Sequences longer than {config.seq_len} tokens were never seen in training.

## Held-out loss
| step | training tokens | nats per token |
| --- | --- | --- |
{curve}

## Greedy answers to held-out questions
As the model gave them, cut at {facts["new_tokens"]} tokens.

{samples}""")
