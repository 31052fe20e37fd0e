"""Texts: read in any Unicode encoding; sizes, long values, dtypes and class names in messages."""

import json
import reprlib
import shlex
from pathlib import Path
from typing import Any

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
LONGEST = 100  # characters of a value in a message


def size_text(size: float) -> str:
    """Bytes in a decimal unit: ``"512 bytes"``, ``"3.41 MB"``, ``"41.2 GB"``."""
    unit = 0
    while abs(size) >= (999.5 if unit else 1000) and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    if unit == 0:
        return f"{size:,.0f} byte{'' if round(size) == 1 else 's'}"
    digits = 0 if abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:,.{digits}f} {UNITS[unit]}"


def shortened(value: Any, longest: int = LONGEST) -> str:
    """``repr(value)``, shortened in the middle of a long text or number and at the end of a long list."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxlist, brief.maxtuple, brief.maxset, brief.maxdict = 3, 8, 8, 8, 6
    brief.maxstring = brief.maxlong = brief.maxother = longest
    return brief.repr(value)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; of an empty one, the name of its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def with_article(noun: str) -> str:
    """``"EagleHead"`` -> ``"an EagleHead"``."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def how_to_import(source: str) -> str:
    """The command that imports ``source``, if that is a head in the form of its authors."""
    return (
        f"A released head or an export is imported first: python -m drafters.convert {source} --target MODEL --out "
        "FOLDER (a Kangaroo adapter with --exit-layer N)"
    )


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, UTF-16 or UTF-32, with or without a byte-order mark.

    Raises:
        ValueError: it is in another encoding, or no text; the message says how to convert it.
        OSError: it cannot be read.
    """
    return decode(path.read_bytes(), path)


def decode(data: bytes, path: Path) -> str:
    """``data``, the content of the file ``path``, as text; raises ValueError as ``read_text`` does."""
    encoding = json.detect_encoding(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(not_unicode(data, encoding, error, path)) from None


def not_unicode(data: bytes, encoding: str, error: UnicodeDecodeError, path: Path) -> str:
    """The message for the file ``path`` with ``data`` that cannot be decoded."""
    if not encoding.startswith("utf-8") or b"\0" in data:
        return f"{path} is damaged {encoding.upper()}, or no text: {error.reason} at byte {error.start:,}; replace it"
    # Bytes 0x80 to 0x9F are characters in Windows' code page, and unused control characters in Latin-1.
    name = "WINDOWS-1252" if any(0x80 <= byte <= 0x9F for byte in data) else "ISO-8859-1"
    return (
        f"{path} is not UTF-8 (byte 0x{data[error.start]:02x}), probably {name}; convert it with: "
        f"iconv -f {name} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(path.with_name('utf8-' + path.name)))}"
    )


def json_object(path: Path, source: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it holds something else, or NaN or Infinity; the message begins with ``source``.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"it holds {name}, which is no number of JSON")

    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # of JSON and UTF-8
        raise ValueError(f"{source} is not valid JSON ({error}); it may be half-written") from None
    if not isinstance(content, dict):
        raise ValueError(f"{source} must hold an object of keys and values, found {shortened(content)}")
    return content
