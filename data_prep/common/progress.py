"""Progress bars that print lines in log files, and nothing before the first progress."""

import os
import sys
import time
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0  # between two lines in a log file
WITHOUT_TIME_LEFT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"  # if the postfix has it


class Bar(tqdm):
    """tqdm's bar on stderr, on the first rank.

    It is not drawn before the first ``update``, so that no empty bar comes before an error. If stderr is not a
    terminal, it prints a line every ``LOG_SECONDS`` and at the end.
    """

    disable: bool

    def __init__(self, *arguments: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stderr
        self._lines = not stream.isatty()
        self._last_line = time.monotonic()
        options.setdefault("mininterval", LOG_SECONDS if self._lines else 1.0)
        options["disable"] = options.get("disable", False) or os.environ.get("RANK", "0") != "0"
        super().__init__(*arguments, **options)

    def refresh(self, *arguments: Any, **options: Any) -> None:
        if self.disable or self.n == self.initial:
            return
        if not self._lines:
            super().refresh(*arguments, **options)
        elif time.monotonic() - self._last_line >= LOG_SECONDS:
            self._write_line()

    def clear(self, *arguments: Any, **options: Any) -> None:
        if not self._lines and self.n != self.initial:  # a bar that was never drawn has no line
            super().clear(*arguments, **options)

    def close(self) -> None:
        if self.disable:
            return
        if not self._lines and self.n != self.initial:
            super().close()
            return
        if self._lines and self.leave and self.n != self.initial:
            self._write_line()
        self.disable = True
        self._decr_instances(self)

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        print(self, file=self.fp, flush=True)


def quiet_in_log_files() -> None:
    """In log files, switch off transformers' bars (one for every loaded model)."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
