"""A conversation in the terminal, with drafted tokens in colour."""

import contextlib
import io
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream
from transformers.utils.logging import disable_progress_bar

from drafters.base import Drafter
from drafters.common.threads import fit_threads
from drafters.common.wording import dtype_name
from drafters.loading import load_drafter
from drafters.loop.generate import Trace, generate
from drafters.loop.sampling import Sampling
from drafters.methods import make_drafter
from drafters.model.files import load_bare_tokenizer
from drafters.model.target import TargetModel
from drafters.policy.costs import prepare

COLOURS = ("green", "cyan", "magenta", "yellow")  # of drafters, in the order of their first accepted drafts
# Removed from a model's output: a terminal's escape sequences can set its title, its keys or its clipboard.
CONTROLS = dict.fromkeys([*(code for code in range(32) if chr(code) not in "\n\t"), *range(127, 160)])
COMMANDS = "/reset begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class Stopped(Exception):
    """Ends an answer before its last token."""


@dataclass
class Answer:
    """One answer: printed and counted while its tokens are committed.

    Attributes:
        colours: by drafter name; shared by all answers.
        drafted: number of accepted draft tokens by drafter name.
        seconds: from the first token, which the prefill gives, to the last, without the time spent on printing.
    """

    console: Console
    tokenizer: Any
    drafter: str
    colours: dict[str, str]
    stopped: bool = False
    ids: list[int] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    drafted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    text: str = ""
    _stream: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    _began: float = 0.0
    _printing: float = 0.0

    def write(self, row: int, new: list[int]) -> None:
        """Print the new token ids of a step; ``generate`` calls it after every step."""
        now = time.perf_counter()
        if not self.ids:
            self._began = now
        self.seconds = now - self._began - self._printing
        step = self.trace.steps[-1] if self.trace.steps else None  # none: the prefill's token
        accepted = 0 if step is None else min(step.accepted, len(new))
        if step is not None and accepted:
            source = step.source or self.drafter
            self.drafted[source] += accepted
            self._print(new[:accepted], self.colours.setdefault(source, COLOURS[len(self.colours) % len(COLOURS)]))
        self._print(new[accepted:], "")
        self.ids += new
        self._printing += time.perf_counter() - now
        if self.stopped:
            raise Stopped

    def _print(self, ids: list[int], colour: str) -> None:
        pieces = (self._stream.step(self.tokenizer.backend_tokenizer, token) for token in ids)
        if text := "".join(piece for piece in pieces if piece):
            self.text += text
            self.console.print(Text(text.translate(CONTROLS), colour), end="", soft_wrap=True)

    @property
    def speed(self) -> float:
        """Tokens/s after the prefill; 0 if there was no step."""
        return (len(self.ids) - 1) / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> Text:
        """``[91 tokens, tau 2.36, 182 tokens/s, drafted: eagle 61%]``, with the share of each drafter."""
        said = Text(f"[{len(self.ids):,} tokens, tau {self.trace.tau:.2f}, {self.speed:.0f} tokens/s", "dim")
        for number, (name, accepted) in enumerate(self.drafted.most_common()):
            said.append(", drafted: " if number == 0 else ", ", "dim")
            said.append(f"{name} {accepted / len(self.ids):.0%}", self.colours[name])
        return said.append("; stopped]" if self.stopped else "]", "dim")


@dataclass
class Chat:
    """A conversation with a target through a drafter; ``plain`` decodes every answer again, for comparison."""

    console: Console
    target: TargetModel
    drafter: Drafter
    plain: Drafter | None
    tokenizer: Any
    max_new_tokens: int
    temperature: float
    seed: int
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    colours: dict[str, str] = field(default_factory=dict)

    def say(self, text: str | Text = "", style: str = "dim") -> None:
        """Print a line that is not part of an answer."""
        self.console.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the conversation, up to the beginning of the answer.

        Raises:
            ValueError: the template does not take such messages.
        """
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        try:
            encoded = self.tokenizer.apply_chat_template(
                [*system, *messages], add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except TemplateError as error:
            hint = "; leave --system out" if system else ""
            raise ValueError(f"the chat template of {self.target.name} refuses this: {error}{hint}") from None
        return list(encoded["input_ids"])

    def ask(self, question: str) -> None:
        """Answer the question; the oldest turns are dropped if the context is full.

        Raises:
            ValueError: the question alone is too long; the conversation does not change.
        """
        limit = min(d.max_context for d in (self.drafter, self.plain) if d is not None) - self.max_new_tokens
        asked = [*self.messages, {"role": "user", "content": question}]
        ids, dropped = self.prompt(asked), 0
        while len(ids) > limit and len(asked) > 2:
            asked, dropped = asked[2:], dropped + 1
            ids = self.prompt(asked)
        if len(ids) > limit:
            raise ValueError(f"{len(ids):,} tokens, and beside the answer there is room for {limit:,}: ask for less")
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.say(f"[the context is full: the oldest {turns} forgotten]")
        answer = self.decode(self.drafter, ids)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self.plain is not None and not answer.stopped:
            self.say("plain decoding:")
            self.say(self.verdict(answer, self.decode(self.plain, ids)))

    def decode(self, drafter: Drafter, ids: list[int]) -> Answer:
        """Decode and print an answer by ``drafter``, and its figures."""
        answer = Answer(self.console, self.tokenizer, drafter.name, self.colours)
        fit_threads()
        # Ctrl-C stops the answer after the current step, so that the drafter's state is complete.
        with contextlib.suppress(Stopped), handling(signal.SIGINT, lambda *_: setattr(answer, "stopped", True)):
            options: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed, "trace": answer.trace}
            length = self.max_new_tokens
            generate(self.target, drafter, [ids], max_new_tokens=length, on_tokens=answer.write, **options)
        self.say()
        self.say(answer.summary())
        return answer

    def verdict(self, answer: Answer, plain: Answer) -> str:
        """Compare speed and tokens of the two answers."""
        if plain.stopped or not plain.speed:
            return "[no speedup to report]"
        same = next((n for n, pair in enumerate(zip(answer.ids, plain.ids, strict=False)) if pair[0] != pair[1]), None)
        if self.temperature:
            tokens = ""  # sampled texts differ
        elif same is None:
            tokens = ", the same tokens"
        else:
            tokens = f", the same tokens up to number {same:,}, where they part"
        return f"[{self.drafter.name}: {answer.speed / plain.speed:.2f} times as fast{tokens}]"

    def warm_up(self) -> None:
        """Measure step costs and build kernels, so that the first question does not wait for them."""
        ids = self.prompt([{"role": "user", "content": "Hello!"}])
        with self.console.status("measuring what a step costs on this machine (cached for the next time)"):
            prepare(self.drafter, 1, Sampling(self.temperature), self.drafter.max_context)
            for drafter in filter(None, (self.drafter, self.plain)):
                # A cache for a whole answer, because graphs are captured for its size; stopped after four steps.
                steps = iter(range(4))
                options: dict[str, Any] = {"on_tokens": lambda row, new, steps=steps: next(steps)}
                room = min(self.max_new_tokens, drafter.max_context - len(ids))
                options |= {"max_new_tokens": room, "temperature": self.temperature, "eos_token_id": []}
                with contextlib.suppress(StopIteration):
                    if room > 0:
                        generate(self.target, drafter, [ids], **options)

    def talk(self) -> None:
        """Read and answer lines until the input ends or /quit."""
        while (line := self._read()) is not None:
            line = line.strip()
            if line == "/reset":
                self.messages = []
                self.say("[a new conversation]")
            elif line == "/quit":
                return
            elif line.startswith("/") and len(line.split()) == 1:
                self.say(f"[no command {line}: {COMMANDS}]")
            elif line:
                try:
                    check_text(line, "the line")
                    self.ask(line)
                except ValueError as error:
                    self.say(f"[{error}]", "red")

    def _read(self) -> str | None:
        """The next line; None at the input's end."""
        while True:
            try:
                if sys.stdin.isatty():
                    return input("> ")
                if line := sys.stdin.readline():
                    self.say(f"> {line.rstrip().encode(errors='replace').decode()}", "")
                return line or None
            except EOFError:
                self.say()
                return None
            except KeyboardInterrupt:
                self.say()
                self.say(f"[{COMMANDS}]")


def check_text(text: str, name: str) -> None:
    """Raise ValueError if ``text`` has bytes that are not UTF-8; Python decoded them by "surrogateescape"."""
    if (byte := next((char for char in text if "\udc80" <= char <= "\udcff"), None)) is not None:
        raise ValueError(
            f"{name} is not UTF-8, it has the byte 0x{ord(byte) - 0xDC00:02x}: set the terminal to UTF-8; convert a "
            "file with iconv -t UTF-8"
        )


@contextlib.contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal by ``handler``."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def run(parsed: Namespace, method: bool, options: dict[str, Any]) -> None:
    """Load target and drafter, and talk.

    Raises:
        ValueError: something cannot be loaded, or the limit of an answer does not fit the context.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lets input() edit its line and go back to earlier ones)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a wrong byte must not end the conversation: see check_text
    console = Console(highlight=False, markup=False)
    disable_progress_bar()
    chat = load(console, parsed, method, options)
    chat.warm_up()
    lossy = "" if chat.drafter.lossless else ", lossy: its answers are not the target's own"
    device, dtype, speeder = chat.target.device, dtype_name(chat.target.dtype), chat.drafter.name
    precision = f"{parsed.quantize}, {dtype}" if parsed.quantize else dtype
    chat.say(f"[{parsed.target} ({precision}, {device}), drafter: {speeder}{lossy}; {COMMANDS}]")
    # Ctrl-C as KeyboardInterrupt, while a line is read.
    with handling(signal.SIGINT, signal.default_int_handler), handling(signal.SIGTERM, signal.SIG_DFL):
        chat.talk()


def load(console: Console, parsed: Namespace, method: bool, options: dict[str, Any]) -> Chat:
    """A new conversation; raises ValueError as ``run`` does."""
    check_text(parsed.system or "", "--system")
    tokenizer = load_bare_tokenizer(parsed.target)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {parsed.target} has no chat template: use a model that was trained for chat"
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"the tokenizer of {parsed.target} has no tokenizer.json, which printing token by token needs")
    target = TargetModel.from_pretrained(parsed.target, parsed.dtype, quantize=parsed.quantize)
    name = "autoregressive" if parsed.drafter == "none" else parsed.drafter
    drafter = make_drafter(name, target, **options) if method else load_drafter(name, target, **options)
    if parsed.max_new_tokens >= drafter.max_context:
        raise ValueError(
            f"--max-new-tokens is {parsed.max_new_tokens:,}, and {parsed.target} with this drafter has a context of "
            f"{drafter.max_context:,}: give less"
        )
    plain = make_drafter("autoregressive", target) if parsed.compare else None
    decoding = parsed.max_new_tokens, parsed.temperature, parsed.seed, parsed.system
    chat = Chat(console, target, drafter, plain, tokenizer, *decoding)
    chat.prompt([{"role": "user", "content": "Hello!"}])
    return chat
