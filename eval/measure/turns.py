"""Later turns of a conversation: prompts with plain decoding's greedy answers to the earlier turns.

All methods get the same prompts, independent of their own answers.
"""

import fcntl
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.store.lock import lock_file
from drafters.common.files import naming
from eval.measure.identity import digest
from eval.measure.run_journal import json_lines
from eval.prompts.prompts import Prompt, PromptSet, render

ANSWERS = "turns.jsonl"

Answer = Callable[[Prompt], list[int]]  # returns the tokens of a prompt's answer


def with_later_turns(
    prompts: PromptSet, tokenizer: Any, answer: Answer, longest: Callable[[Prompt], int], path: Path, target: list[str]
) -> PromptSet:
    """Add the later turns after every prompt that has them; turns that are too long are counted as skipped.

    Args:
        answer: plain decoding of the target. longest: largest number of tokens of a prompt.
        path: file of the answers. Each is made once, so that a resumed run has the same prompts. Of several processes
            one makes the answers while the others wait.
        target: identifies the target; answers of others are not used.
    """
    if not any(prompt.record is not None and prompt.record.later for prompt in prompts.measured):
        return prompts
    measured, skipped = [], prompts.skipped.copy()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        lock_file(path.parent, file, fcntl.LOCK_EX)
        lines = list(json_lines(file))
        file.truncate(lines[-1][0] if lines else 0)  # a kill may have left half a line
        known = {line["prompt"]: line["tokens"] for _, line in lines}
        for first in prompts.measured:
            measured.append(first)
            later = first.record.later if first.record is not None else ()
            for turn, text in enumerate(later, start=2):
                key = digest([target, measured[-1].ids, measured[-1].max_new_tokens])
                if key not in known:
                    known[key] = answer(measured[-1])
                    with naming(path):
                        file.write(json.dumps({"prompt": key, "tokens": known[key]}).encode() + b"\n")
                        file.flush()
                following = _after(measured[-1], known[key], text, turn, tokenizer)
                if len(following.ids) > longest(following):
                    skipped["too_long"] += len(later) - turn + 2
                    break
                measured.append(following)
    return replace(prompts, measured=measured, skipped=skipped)


def _after(prompt: Prompt, answer: list[int], text: str, turn: int, tokenizer: Any) -> Prompt:
    content = tokenizer.decode(answer, skip_special_tokens=True)
    messages = [*prompt.question, {"role": "assistant", "content": content}, {"role": "user", "content": text}]
    first = prompt.id.removesuffix(f"/{prompt.turn}") if prompt.turn > 1 else prompt.id
    return replace(prompt, id=f"{first}/{turn}", ids=render(tokenizer, messages), question=messages, turn=turn)
