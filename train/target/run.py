"""The training loop of train.target."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data_prep.common.progress import Bar
from drafters.cli.program import command
from drafters.common.files import replace_json
from drafters.common.precision import training_dtype
from train.configs import TargetConfig
from train.core.attention import CAUSAL
from train.run.files import Metrics, how_to_repeat, read_metrics, read_object
from train.target.data import batches, encode, get_tokenizer, pack_rows, read_messages
from train.target.export import export, sample_continuations, write_card
from train.target.model import (
    Optimizer,
    TargetProgress,
    build_model,
    checkpoints,
    load_target_state,
    lr_scale,
    next_token_loss,
    save_target_state,
)


class TargetRun:
    """One training run: its data, model, optimiser and files."""

    def __init__(self, config: TargetConfig, resume: bool, arguments: list[str]) -> None:
        # One core per worker instead of all cores per operation: a busy machine loses most of its time at barriers
        # inside operations.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(config.threads, initializer=torch.set_num_threads, initargs=(1,))
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if not resume and checkpoints(config.run_dir):
            raise ValueError(f"{config.run_dir} already holds a run: pass --resume or another run_dir=")
        if config.precision == "auto":
            fast = training_dtype(torch.device("cpu")) == torch.bfloat16
            config = config.model_copy(update={"precision": "bf16" if fast else "float32"})
            print(f"precision: {config.precision} (auto)")
        self.config, self.info, self.stop_asked = config, how_to_repeat(config, arguments), False
        self.tokenizer = get_tokenizer(config)
        self.heldout = read_messages(config.corpus / "heldout.jsonl")
        self.documents = encode(self.tokenizer, read_messages(config.corpus / "train.jsonl"))
        rows = pack_rows(encode(self.tokenizer, self.heldout), config.seq_len + 1, random.Random(0))
        self.heldout_rows = torch.tensor(rows[: max(1, config.eval_tokens // config.seq_len)])
        self.model = build_model(config, self.tokenizer)
        self.model.to(torch.bfloat16 if config.precision == "bf16" else torch.float32)
        self.model.set_attn_implementation(CAUSAL)
        self.optimizer = Optimizer(self.model, config, self.pool)
        self.progress = load_target_state(config.run_dir, self.optimizer) if resume else TargetProgress()
        self.log = Metrics(config.run_dir, self.progress.step)
        replace_json(config.run_dir / "run.json", {**self.info, "resumed_at": self.progress.step})

    def evaluate(self) -> None:
        """Log the held-out loss."""
        parts = self.heldout_rows.split(self.config.micro_rows)
        value = sum(self.pool.map(self.part_loss, parts)) / len(self.heldout_rows)
        step, tokens, seconds = self.progress.step, self.progress.tokens, round(self.progress.seconds, 1)
        self.log.add(step, {"heldout_loss": value, "tokens": tokens, "seconds": seconds})
        tqdm.write(f"step {step}: held-out loss {value:.4f} after {tokens:,} tokens")

    @torch.no_grad()
    def part_loss(self, rows: Tensor) -> float:
        """Summed loss of some rows, without gradients (a setting of each thread)."""
        return float(next_token_loss(self.model, rows, self.config.precision)) * len(rows)

    def part_gradients(self, rows: Tensor) -> tuple[float, list[Tensor]]:
        """A worker's share of a batch: its loss and gradients, both weighted by its share of the rows."""
        share = len(rows) / self.config.batch_rows
        loss = next_token_loss(self.model, rows, self.config.precision) * share
        gradients = torch.autograd.grad(loss, list(self.optimizer.working.values()))
        return float(loss.detach()), [gradient.float() for gradient in gradients]

    def train_step(self, batch: Tensor) -> tuple[float, float]:
        """One optimiser step; returns the batch's loss and gradient norm. The order of sums is fixed."""
        total, gradients = 0.0, None
        for loss, part in self.pool.map(self.part_gradients, batch.split(self.config.micro_rows)):
            total += loss
            gradients = part if gradients is None else [a.add_(b) for a, b in zip(gradients, part, strict=True)]
        assert gradients is not None
        return total, self.optimizer.step(gradients, lr_scale(self.progress.step, self.config))

    def ask_to_stop(self, *_: Any) -> None:
        """SIGTERM: save and exit after the current step."""
        self.stop_asked = True

    def train(self) -> None:
        """Train from the current step to the last one, with evaluations, checkpoints and exports."""
        config, progress = self.config, self.progress
        if progress.step > config.steps:
            raise ValueError(f"the run is already at step {progress.step}, past steps={config.steps}")
        saved = exported = time.monotonic()
        source = batches(self.documents, config, progress.position)
        for _ in Bar(range(progress.step, config.steps), initial=progress.step, total=config.steps):
            began, scale = time.monotonic(), lr_scale(progress.step, config)
            batch, progress.position = next(source)
            loss, norm = self.train_step(batch)
            seconds, tokens = time.monotonic() - began, batch[:, 1:].numel()
            progress.step, progress.tokens = progress.step + 1, progress.tokens + tokens
            progress.seconds += seconds
            figures = {"loss": loss, "grad_norm": norm, "lr_scale": scale}
            self.log.add(progress.step, {**figures, "tokens_per_second": round(tokens / seconds, 1)})
            if progress.step % config.eval_every == 0 and progress.step < config.steps:
                self.evaluate()
            if self.stop_asked:
                save_target_state(config.run_dir, self.optimizer, progress)
                raise KeyboardInterrupt(signal.SIGTERM)
            if time.monotonic() - saved >= 60 * config.save_minutes:
                save_target_state(config.run_dir, self.optimizer, progress)
                saved = time.monotonic()
            if time.monotonic() - exported >= 60 * config.export_minutes:
                export(config.run_dir / "export", self.model, self.tokenizer)
                exported = time.monotonic()
        self.evaluate()
        save_target_state(config.run_dir, self.optimizer, progress)

    def finish(self, new_tokens: int = 120) -> None:
        """The final export, with its model card."""
        config = self.config
        for folder in (config.run_dir / "export", config.final_dir):
            export(folder, self.model, self.tokenizer)
        prompts = [dialogue[0]["content"] for dialogue in self.heldout[:5]]
        facts = {
            "rows": read_metrics(config.run_dir),
            "samples": sample_continuations(config.final_dir, prompts, new_tokens),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dialogues": len(self.documents),
            "tokens": sum(map(len, self.documents)),
            "heldout_tokens": self.heldout_rows[:, 1:].numel(),
            "python": read_object(config.corpus / "manifest.json").get("python"),
            "new_tokens": new_tokens,
        }
        write_card(config.final_dir, config, self.info, self.progress, facts)


def run(config: TargetConfig, resume: bool, arguments: list[str]) -> None:
    """Train to the last step and export; SIGTERM saves and exits after the current step."""
    next_command = f"make its features: python -m data_prep.features --config F target={config.final_dir}"
    if resume and is_finished(config):
        print(f"the run is finished already, at step {config.steps:,}: {config.final_dir}; {next_command}")
        return
    run = TargetRun(config, resume, arguments)
    if resume:
        print(f"continues after step {run.progress.step:,} of {config.steps:,}")
    signal.signal(signal.SIGTERM, run.ask_to_stop)
    run.train()
    run.finish()
    print(f"the trained target: {config.final_dir}; {next_command}")


def is_finished(config: TargetConfig) -> bool:
    """Whether the last step's checkpoint exists, and a later export with its card, which is written last."""
    last, card = config.run_dir / f"checkpoint-{config.steps:08d}", config.final_dir / "README.md"
    return last in checkpoints(config.run_dir) and card.is_file() and card.stat().st_mtime >= last.stat().st_mtime


def kept(config: TargetConfig) -> str:
    """What an interrupted run has saved, and the command that continues it."""
    found = checkpoints(config.run_dir)
    if not found:
        return f"no checkpoint was saved yet; to start again: {command()}"
    return f"{found[-1]} is saved; to continue from there: {command('--resume')}"
