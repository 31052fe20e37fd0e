"""JSON records of a file: one a line, or one list of them; gzipped or not, in any Unicode encoding."""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from drafters.common.files import decode, not_unicode, unicode_encoding

# Odd bytes in fewer lines are damage, and cost those lines; in more of them, and no line in UTF-8, the file is another.
FEW = 0.01


class Unreadable:
    """Stands in for a line that is no JSON; ``reason`` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, record) of every record: the line's number, or the place in the list, counted from 1.

    A line that is no JSON is ``Unreadable``; blank ones are left out.

    Raises:
        ValueError: a damaged gzip file, a broken JSON list, or a file that is in no Unicode encoding.
        OSError: the file cannot be read.
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
        if unicode_encoding(head).startswith("utf-8"):
            yield file
        else:
            yield io.BytesIO(decode(file.read(), path).encode("utf-8", "surrogatepass"))


def _records(file: IO[bytes], path: Path) -> Iterator[tuple[int, Any]]:
    first, trusted = True, False
    for number, line in enumerate(file, start=1):
        start = line.removeprefix(b"\xef\xbb\xbf").lstrip() if first else line.lstrip()
        if not start:
            continue
        if first and start.startswith(b"["):  # one JSON list; among records one a line it is a bad record
            yield from enumerate(_json_list(start + file.read(), path), start=1)
            return
        first = False
        try:
            yield number, json.loads(start.decode("utf-8"))
        except UnicodeDecodeError as error:
            if not trusted:
                _check_encoding(path, start, error)
                trusted = True
            yield number, Unreadable("not_utf8")
        except (ValueError, RecursionError):  # JSONDecodeErrors are ValueErrors
            yield number, Unreadable("broken_json")


def _json_list(data: bytes, path: Path) -> list[Any]:
    text = decode(data, path)
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} starts like a JSON list but is broken: {error}") from error
    assert isinstance(records, list)  # it starts with a bracket
    return records


def _check_encoding(path: Path, line: bytes, error: UnicodeDecodeError) -> None:
    """Raise ValueError if the file, of which ``line`` is not UTF-8, is in another encoding and not damaged there."""
    lines = odd = 0
    with _opened(path) as file:
        for each in file:
            lines += 1
            if each.isascii():
                continue
            try:
                each.decode("utf-8")
            except UnicodeDecodeError:
                odd += 1
            else:
                return
    if odd >= FEW * lines:
        raise ValueError(not_unicode(line, "utf-8", error, path))
