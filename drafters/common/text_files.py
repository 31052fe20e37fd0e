"""Text files in whichever Unicode encoding they come; of others the error names the encoding and what converts it."""

import json
import shlex
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, UTF-16 or UTF-32, with or without a byte-order mark.

    Raises:
        ValueError: it is in another encoding, or no text.
        OSError: it cannot be read.
    """
    return decode(path.read_bytes(), path)


def decode(data: bytes, path: Path) -> str:
    """``data``, the content of the file ``path``, as text; raises ValueError as ``read_text`` does."""
    encoding = unicode_encoding(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(not_unicode(data, encoding, error, path)) from None


def strict_json(text: str) -> Any:
    """Return the content of ``text``, which is JSON; NaN and Infinity are a ValueError, too."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"it holds {name}, which is no number of JSON")


def unicode_encoding(head: bytes) -> str:
    """Which of the Unicode encodings a text has that begins with ``head`` (at least 4 bytes) and an ASCII character."""
    return json.detect_encoding(head)


def not_unicode(data: bytes, encoding: str, error: UnicodeDecodeError, path: Path) -> str:
    """What to say of the file ``path``, of which ``data`` cannot be decoded."""
    if not encoding.startswith("utf-8"):
        return (
            f"{path} is damaged {encoding.upper()}, or no text: {error.reason} at byte {error.start:,}; save it again"
        )
    if b"\0" in data:
        return f"{path} is no text file: it holds zero bytes"
    # These have only signs of Windows' code page; Latin-1 has unused control characters there.
    windows = any(0x80 <= byte <= 0x9F for byte in data)
    name, code = ("Windows-1252", "WINDOWS-1252") if windows else ("Latin-1", "ISO-8859-1")
    place = shlex.quote(str(path))
    return (
        f"{path} is not UTF-8 (byte 0x{data[error.start]:02x}), probably {name}; convert it with: "
        f"iconv -f {code} -t UTF-8 {place} > {shlex.quote(str(path.with_name('utf8-' + path.name)))}"
    )
