"""What drafters.chat does: load, then answer line after line."""

import contextlib
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from drafters.base import Drafter
from drafters.common.threads import fit_threads
from drafters.common.wording import dtype_name
from drafters.loading import load_drafter
from drafters.loop.generate import generate
from drafters.loop.sampling import Sampling
from drafters.loop.trace import Trace
from drafters.methods import make_drafter
from drafters.model.files import load_bare_tokenizer
from drafters.model.target import TargetModel
from drafters.policy.costs import prepare

COLOURS = ("green", "cyan", "magenta", "yellow")  # of drafters, in the order in which their drafts are first accepted
# What a model may write and a terminal would obey: escape sequences set its title, its keys or its clipboard.
CONTROLS = dict.fromkeys([*(code for code in range(32) if chr(code) not in "\n\t"), *range(127, 160)])
COMMANDS = "/reset begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class Few:
    """Ends an answer after a few tokens, whatever it had room for."""

    alters = False

    def scores(self, row: int, new: list[int], logits: Tensor) -> Tensor:
        """As they are."""
        return logits

    def ends(self, row: int, new: list[int]) -> bool:
        """After eight."""
        return len(new) >= 8


class Stopped(Exception):
    """Ctrl-C: no more of this answer is wanted."""


@dataclass
class Answer:
    """One answer while it is written: printed as its tokens are committed, and counted.

    Attributes:
        colours: of the drafters, by their names; shared by all answers.
        drafted: accepted draft tokens, by who drafted them.
        seconds: from the first token, which the prefill gives, to the last, without those spent on printing.
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
        """What ``generate`` calls with the ids of every step."""
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
        """Tokens/s after the prefill; 0 where there was no step."""
        return (len(self.ids) - 1) / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> Text:
        """``tau 2.36, 182 tokens/s, 61% drafted``, with the share of each where several drafted."""
        said = Text(f"[{len(self.ids):,} tokens, tau {self.trace.tau:.2f}, {self.speed:.0f} tokens/s", "dim")
        for number, (name, count) in enumerate(self.drafted.most_common()):
            said.append(", drafted: " if number == 0 else ", ", "dim")
            said.append(f"{name} {count / len(self.ids):.0%}", self.colours[name])
        return said.append("; stopped]" if self.stopped else "]", "dim")


@dataclass
class Chat:
    """A target, a drafter, and what was said."""

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
        """A line that is not of the answer."""
        self.console.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids up to where the answer begins.

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
        """Answer, with the turns before as far as the context holds them.

        Raises:
            ValueError: the question alone is too long; what was said before stays.
        """
        limit = min(d.max_context for d in (self.drafter, self.plain) if d is not None) - self.max_new_tokens
        asked = [*self.messages, {"role": "user", "content": question}]
        ids, dropped = self.prompt(asked), 0
        while len(ids) > limit and len(asked) > 2:
            asked, dropped = asked[2:], dropped + 1
            ids = self.prompt(asked)
        if len(ids) > limit:
            raise ValueError(
                f"{len(ids):,} tokens, and beside --max-new-tokens {self.max_new_tokens:,} the context has room for "
                f"{limit:,}: ask for less"
            )
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.say(f"[the context is full: the oldest {turns} forgotten]")
        answer = self.decode(self.drafter, ids)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if self.plain is not None and not answer.stopped:
            self.say("plain decoding:")
            self.say(self.verdict(answer, self.decode(self.plain, ids)))

    def decode(self, drafter: Drafter, ids: list[int]) -> Answer:
        """An answer by ``drafter``, printed with what it took."""
        answer = Answer(self.console, self.tokenizer, drafter.name, self.colours)
        fit_threads()
        with contextlib.suppress(Stopped), on_interrupt(answer):
            options: dict[str, Any] = {"temperature": self.temperature, "seed": self.seed, "trace": answer.trace}
            length = self.max_new_tokens
            generate(self.target, drafter, [ids], max_new_tokens=length, on_tokens=answer.write, **options)
        self.say()
        self.say(answer.summary())
        return answer

    def verdict(self, answer: Answer, plain: Answer) -> str:
        """How the two compare."""
        if plain.stopped or not plain.speed:
            return "[no speedup to tell]"
        same = next((n for n, pair in enumerate(zip(answer.ids, plain.ids, strict=False)) if pair[0] != pair[1]), None)
        if self.temperature:
            tokens = ""  # other draws of the same distribution
        elif same is None:
            tokens = ", the same tokens"
        else:
            tokens = f", the same tokens up to number {same:,}, where they part"
        return f"[{self.drafter.name}: {answer.speed / plain.speed:.2f} times as fast{tokens}]"

    def warm_up(self) -> None:
        """Before the first question, which would wait for it: what a step costs is measured, at the temperature and the
        lengths that may come, and kernels are built by a few tokens of anything.
        """
        ids = self.prompt([{"role": "user", "content": "Hello!"}])
        with self.console.status("measuring what a step costs here (it is kept for the next time)"):
            prepare(self.drafter, 1, Sampling(self.temperature), self.drafter.max_context)
            for drafter in filter(None, (self.drafter, self.plain)):
                options: dict[str, Any] = {"temperature": self.temperature, "eos_token_id": []}
                # With room for a whole answer: what is captured of its cache is there for the first question.
                room = min(self.max_new_tokens, drafter.max_context - len(ids))
                if room > 0:
                    generate(self.target, drafter, [ids], max_new_tokens=room, control=Few(), **options)

    def talk(self) -> None:
        """Line after line until the input ends or /quit."""
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
                    self.say(f"> {line.rstrip()}", "")
                return line or None
            except EOFError:
                self.say()
                return None
            except KeyboardInterrupt:
                self.say()
                self.say(f"[{COMMANDS}]")


@contextlib.contextmanager
def on_interrupt(answer: Answer) -> Iterator[None]:
    """Ctrl-C stops ``answer`` after the step that runs, so that no drafter is left in the middle of something."""

    def stop(number: int, frame: FrameType | None) -> None:
        answer.stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(given: Namespace, method: bool, options: dict[str, Any]) -> None:
    """Load what was asked for and talk.

    Raises:
        ValueError: something does not fit, or cannot be loaded.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lets input() edit its line and go back to earlier ones)
    console = Console(highlight=False, markup=False)
    disable_progress_bar()
    chat = load(console, given, method, options)
    chat.warm_up()
    lossy = "" if chat.drafter.lossless else ", lossy: its answers are not the target's own"
    device, dtype, speeder = chat.target.device, dtype_name(chat.target.dtype), chat.drafter.name
    precision = f"{given.quantize}, {dtype}" if given.quantize else dtype
    chat.say(f"[{given.target} ({precision}, {device}), drafter: {speeder}{lossy}; {COMMANDS}]")
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as KeyboardInterrupt, while a line is read
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        chat.talk()
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def load(console: Console, given: Namespace, method: bool, options: dict[str, Any]) -> Chat:
    """The conversation's beginning; raises ValueError as ``run`` does."""
    tokenizer = load_bare_tokenizer(given.target)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {given.target} has no chat template, so it takes no conversation: use one "
            "that was trained for chat"
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"the tokenizer of {given.target} has no tokenizer.json, by which text is printed as it comes")
    target = TargetModel.from_pretrained(given.target, given.dtype, quantize=given.quantize)
    name = "autoregressive" if given.drafter == "none" else given.drafter
    drafter = make_drafter(name, target, **options) if method else load_drafter(name, target, **options)
    if given.max_new_tokens >= drafter.max_context:
        raise ValueError(
            f"--max-new-tokens is {given.max_new_tokens:,}, and {given.target} with this drafter has a context of "
            f"{drafter.max_context:,}: give less"
        )
    plain = make_drafter("autoregressive", target) if given.compare else None
    decoding = given.max_new_tokens, given.temperature, given.seed, given.system
    chat = Chat(console, target, drafter, plain, tokenizer, *decoding)
    chat.prompt([{"role": "user", "content": "Hello!"}])
    return chat
