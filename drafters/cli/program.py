"""A `main` as a program: its arguments; the user's mistakes and Ctrl-C end in one line instead of a stack trace."""

import argparse
import atexit
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what Slurm and launchers end a run with
LAUNCHERS = ("deepspeed", "torchrun", "deepspeed.pt")


class CommandLine(argparse.ArgumentParser):
    """The arguments of ``python -m program``; --help shows the docstring.

    Args:
        config: what --config takes, in a program that has one.
        overrides: of what ``key=value`` on the command line is an example.
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

    def parse(self, given: list[str] | None) -> argparse.Namespace:
        """``given``, or what this process was started with; ``command`` has all of it, for a report."""
        given = sys.argv[1:] if given is None else given
        parsed = self.parse_intermixed_args(given)
        parsed.command = [*self.prog.split(), *given]
        return parsed


def positive(text: str) -> int:
    """The type of an argument that is a number of something: 8000, 8_000 or 8,000."""
    digits = text.replace("_", "").replace(",", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(digits)


class Failure(RuntimeError):
    """Ends a program as a ValueError does, where it is not the input that is wrong; the message is for the user."""


def run_program(main: Callable[[], int | None]) -> None:
    """Run it and exit with its status: 1 with one line for a mistake, 130 after Ctrl-C, 143 after SIGTERM.

    Until ``main`` enters ``keeping`` nothing can be half-written, so a signal ends the process at once: raised inside
    an import, KeyboardInterrupt would come out as any other error.
    """
    own = os.getpid()

    def leave_at_once(number: int, frame: FrameType | None) -> None:
        _on_signals(_unheard)  # a launcher that gets Ctrl-C, too, sends SIGTERM right after
        if os.getpid() == own:  # and not a worker that was forked
            _say_interrupted(number, f"nothing was begun. To start again: {command()}")
        os._exit(128 + number)

    command()  # while the launcher that started this process still runs
    _on_signals(leave_at_once)
    try:
        status = main()
    except (ValueError, OSError, Failure) as error:
        _on_signals(signal.SIG_DFL)  # where another rank ended first, a launcher sends SIGTERM: no interruption
        _repeat_after_launcher(f"error: {error}")
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as error:
        _on_signals(_unheard)
        kept, number = error.args if len(error.args) == 2 else (f"to start again: {command()}", signal.SIGINT)
        _say_interrupted(number, kept)
        leave(128 + number)
    if status:
        sys.exit(status)


@contextlib.contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """While files are written: a signal is raised as KeyboardInterrupt, so that they are closed as after any error.

    A program enters this once, for all of its work. Inside of it, others tell more: the innermost ``kept`` counts.

    Args:
        kept: what a run that was interrupted here has kept, and the command that goes on: the program's last line.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Elsewhere than in a program (a test, a notebook) signals stay what they are.
    ours = getattr(handler, "__qualname__", "").startswith(run_program.__name__)

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A launcher that gets Ctrl-C, too, sends SIGTERM to processes that are ending already.
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
            error.args = (kept(), *error.args) if error.args else (kept(), signal.SIGINT)
        raise
    if ours:  # what there was to do is done
        _on_signals(signal.SIG_DFL)


def command(*more: str) -> str:
    """The command that started this program, to be typed again, with ``more`` at its end.

    Under a launcher it is the launcher's, as the user typed it.
    """
    global _words
    if _words is None:
        _words = _launched_by() or [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
    return shlex.join([*_words, *(word for word in more if word not in _words)])


def leave(status: int) -> NoReturn:
    """End this process with ``status``: what ``sys.exit`` does, without waiting for threads or taking Python apart.

    Gloo's threads drop the tensors of their last collectives a moment after those are done, which takes the
    interpreter; where that is being taken apart the process aborts ("terminate called without an active exception"),
    and a run that went well ends as a failed one. DeepSpeed's globals keep the group, and so its threads, alive through
    ``destroy_process_group``.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_words: list[str] | None = None


def _launched_by() -> list[str] | None:
    """The command line of the launcher that started this process, if one did."""
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
    """Let a signal end a call in which the main thread sleeps or waits, whichever thread the system gives it to.

    Handlers run in the main thread, which goes on sleeping when another takes the signal; gloo's threads, awake a
    hundred times a second, often do.
    """
    taken, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(signal.SIGURG, _unheard)  # of no meaning of its own
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    main = threading.main_thread().ident
    assert main is not None

    def wake() -> None:
        while number := os.read(taken, 1):
            if number[0] in SIGNALS:
                signal.pthread_kill(main, signal.SIGURG)

    threading.Thread(target=wake, daemon=True).start()


def _unheard(number: int, frame: FrameType | None) -> None:
    """In place of SIG_IGN, of which Python prints "ignored due to race condition" where the signal came before it."""


def _repeat_after_launcher(line: str, interrupted: bool = False) -> None:
    """Let ``line`` stand last under DeepSpeed's launcher, which has lines of its own for a process that failed.

    A process outlives it for that, by milliseconds. It is no child of this one: the launcher ends those, and waits.

    Args:
        interrupted: the `deepspeed` above the launcher got Ctrl-C, too, and ends in a stack trace of its own.
    """
    above = [os.getppid()]
    if os.environ.get("RANK") != "0" or "deepspeed.launcher.launch" not in _words_of(above[0]):
        return
    if interrupted:
        import psutil

        with contextlib.suppress(psutil.Error):
            above.append(psutil.Process(above[0]).ppid())
    try:
        child = os.fork()
    except OSError:  # no memory or no process is left
        return
    if child:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:
            os.closerange(3, 4096)  # the run's lock, its port, the GPU: the next run may want them at once
            for _ in range(2000):  # 20 s: it looks for failed processes once a second
                time.sleep(0.01)
                if not any(_is_deepspeed(process) for process in above):
                    os.write(2, f"{line}\n".encode())
                    break
    finally:  # in no case back into the program
        os._exit(0)


def _is_deepspeed(process: int) -> bool:
    """Whether it runs, and is what the user started or what that started; not whoever has its number now."""
    words = _words_of(process)
    return "deepspeed.launcher.launch" in words or (len(words) > 1 and Path(words[1]).name in LAUNCHERS)


def _words_of(process: int) -> list[str]:
    """A process's command line; of one that has ended, nothing."""
    import psutil

    try:
        return psutil.Process(process).cmdline()
    except psutil.Error:
        return []


def _say_interrupted(number: int, kept: str) -> None:
    """The last line after a signal; after Ctrl-C, which launchers get as well, repeated below theirs."""
    line = f"interrupted; {kept}"
    _say(line)
    if number == signal.SIGINT:
        _repeat_after_launcher(line, interrupted=True)


def _say(line: str) -> None:
    """Write a line to stderr, on the first of several ranks; safe in a signal handler."""
    if os.environ.get("RANK", "0") == "0":
        start = "\n" if sys.stderr.isatty() else ""  # below the ^C and a bar
        os.write(2, f"{start}{line}\n".encode())
