"""JSON records of a file: one per line or one list, gzipped or not, in any Unicode encoding."""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from drafters.common.wording import decode, not_unicode

# Share of lines that are not UTF-8: below it these lines are damaged, above it the file may be in another encoding.
FEW = 0.01


class Unreadable:
    """Takes the place of a line that is not JSON; ``reason``: the reason under which it is counted."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, record) of every record, by line or by place in the list, from 1; ``Unreadable`` for a bad line.

    Raises ValueError for a damaged gzip file, a broken JSON list, or a file in no Unicode encoding.
    """
    try:
        with _opened(path) as file:
            yield from _records(file, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}); fetch it again") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, in UTF-8."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        head = file.read(4)
        file.seek(0)
        if json.detect_encoding(head).startswith("utf-8"):
            yield file
        else:
            yield io.BytesIO(decode(file.read(), path).encode("utf-8", "surrogatepass"))


def _records(file: IO[bytes], path: Path) -> Iterator[tuple[int, Any]]:
    first, checked = True, False
    for number, line in enumerate(file, start=1):
        start = line.removeprefix(b"\xef\xbb\xbf").lstrip() if first else line.lstrip()
        if not start:
            continue
        if first and start.startswith(b"["):  # one JSON list; in a later line it would be a bad record
            text = decode(start + file.read(), path)
            try:
                records = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} starts like a JSON list but is broken: {error}") from error
            yield from enumerate(records, start=1)
            return
        first = False
        try:
            yield number, json.loads(start.decode("utf-8"))
        except UnicodeDecodeError as error:
            if not checked:
                _check_encoding(path, start, error)
                checked = True
            yield number, Unreadable("not_utf8")
        except (ValueError, RecursionError):  # JSONDecodeError is a ValueError
            yield number, Unreadable("broken_json")


def _check_encoding(path: Path, line: bytes, error: UnicodeDecodeError) -> None:
    """Raise ValueError if the file is in another encoding; ``line`` is its first line that is not UTF-8."""
    lines = odd = 0
    with _opened(path) as file:
        for each in file:
            lines += 1
            try:
                if not each.isascii():
                    each.decode("utf-8")
                    return  # another line is UTF-8, so the odd one is damaged
            except UnicodeDecodeError:
                odd += 1
    if odd >= FEW * lines:
        raise ValueError(not_unicode(line, "utf-8", error, path))
