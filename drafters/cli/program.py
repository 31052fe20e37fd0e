"""Run a `main` as a program: its arguments, and one line instead of a stack trace for mistakes and Ctrl-C."""

import argparse
import atexit
import contextlib
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # of Ctrl-C; of Slurm and launchers
LAUNCHERS = ("deepspeed", "torchrun", "deepspeed.pt")


class CommandLine(argparse.ArgumentParser):
    """The arguments of ``python -m program``; --help shows the docstring.

    Args:
        config: help text of --config, in a program that has it.
        overrides: an example of ``key=value`` on the command line, in a program that takes overrides.
    """

    def __init__(
        self, program: str, docstring: str | None, config: str | None = None, overrides: str | None = None
    ) -> None:
        look = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {program}", description=docstring, formatter_class=look)
        if config is not None:
            self.add_argument("--config", required=True, type=Path, help=config)
        if overrides is not None:
            self.add_argument("overrides", nargs="*", metavar="key=value", help=f"for example {overrides}")

    def parse(self, arguments: list[str] | None) -> argparse.Namespace:
        """Parse ``arguments``, or this process's; the result's ``command`` is the whole command, for a report."""
        arguments = sys.argv[1:] if arguments is None else arguments
        parsed = self.parse_intermixed_args(arguments)
        parsed.command = [*self.prog.split(), *arguments]
        return parsed


def positive(text: str) -> int:
    """argparse type of a count: 8000, 8_000 or 8,000."""
    digits = text.replace("_", "").replace(",", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(digits)


def above_zero(text: str) -> float:
    """argparse type of a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, found {text!r}")
    return number


class Failure(RuntimeError):
    """Ends a program with a message for the user, as a ValueError does, although the input is not wrong."""


def run_program(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with its status: 1 with one line for a mistake, 130 after Ctrl-C, 143 after SIGTERM.

    Until ``main`` enters ``keeping``, nothing can be half-written, so a signal ends the process at once. An import
    would turn a KeyboardInterrupt into another error.
    """
    pid = os.getpid()

    def leave_at_once(number: int, frame: FrameType | None) -> None:
        _on_signals(_unheard)  # a launcher that also gets Ctrl-C sends SIGTERM right after
        if os.getpid() == pid:  # not in a forked worker
            _say(f"interrupted; nothing was begun. To start again: {command()}")
        os._exit(128 + number)

    command()  # now, while the launcher of this process still runs
    _on_signals(leave_at_once)
    try:
        status = main()
    except (ValueError, OSError, Failure) as error:
        _on_signals(signal.SIG_DFL)  # a launcher sends SIGTERM when another rank ended first: no interruption
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as error:
        _on_signals(_unheard)
        last_line, number = error.args if len(error.args) == 2 else (f"to start again: {command()}", signal.SIGINT)
        _say(f"interrupted; {last_line}")
        leave(128 + number)
    if status:
        sys.exit(status)


@contextlib.contextmanager
def keeping(last_line: Callable[[], str]) -> Iterator[None]:
    """Raise signals as KeyboardInterrupt while files are written, so that they are closed as after any error.

    A program enters this once, for all of its work; the innermost ``last_line`` counts.

    Args:
        last_line: returns the program's last line after an interruption: what is saved, and the command that continues.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Only in a program: in a test or a notebook, signals stay as they are.
    ours = getattr(handler, "__qualname__", "").startswith(run_program.__name__)

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A launcher that also gets Ctrl-C sends SIGTERM to processes that are already ending.
        signal.signal(signal.SIGTERM, _unheard)
        signal.signal(signal.SIGINT, interrupt_again)
        raise KeyboardInterrupt(number)

    def interrupt_again(number: int, frame: FrameType | None) -> None:
        _say(f"interrupted twice, so left at once, as after a kill; to start again: {command()}")
        os._exit(128 + number)

    if ours:
        _on_signals(interrupt)
        _wake_main_thread()
    try:
        yield
    except KeyboardInterrupt as error:
        if len(error.args) < 2:
            error.args = (last_line(), *error.args) if error.args else (last_line(), signal.SIGINT)
        raise
    if ours:
        _on_signals(signal.SIG_DFL)


def command(*more: str) -> str:
    """The command line to type again, with ``more`` at its end; under a launcher, the launcher's command line."""
    global _words
    if _words is None:
        _words = _launched_by() or [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
    return shlex.join([*_words, *(word for word in more if word not in _words)])


def leave(status: int) -> NoReturn:
    """Exit with ``status`` without waiting for threads and without Python's finalisation.

    Gloo's threads release the tensors of their last collectives a moment later, and need the interpreter for that.
    During finalisation they abort the process ("terminate called without an active exception"), so a run that went well
    would end as a failed one. DeepSpeed's globals keep these threads alive through ``destroy_process_group``.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_words: list[str] | None = None


def _launched_by() -> list[str] | None:
    """The command line of this process's launcher, if it has one."""
    if "RANK" not in os.environ:
        return None
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            if len(words) > 1 and Path(words[1]).name in LAUNCHERS:
                return [Path(words[1]).name, *words[2:]]
    return None


def _on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _wake_main_thread() -> None:
    """Let a signal end a call in which the main thread sleeps, whichever thread receives it.

    Python runs handlers in the main thread, which sleeps on if another thread receives the signal. Gloo's threads wake
    a hundred times a second, so they often do.
    """
    taken, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(signal.SIGURG, _unheard)  # only interrupts the call
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    main = threading.main_thread().ident
    assert main is not None

    def wake() -> None:
        while number := os.read(taken, 1):
            if number[0] in SIGNALS:
                signal.pthread_kill(main, signal.SIGURG)

    threading.Thread(target=wake, daemon=True).start()


def _unheard(number: int, frame: FrameType | None) -> None:
    """Used instead of SIG_IGN, for which Python prints "ignored due to race condition" if the signal came first."""


def _say(line: str) -> None:
    """Write a line to stderr, on the first of several ranks; safe in a signal handler."""
    if os.environ.get("RANK", "0") == "0":
        start = "\n" if sys.stderr.isatty() else ""  # below the ^C and a progress bar
        os.write(2, f"{start}{line}\n".encode())
