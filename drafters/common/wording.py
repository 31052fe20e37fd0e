"""Sizes, long values, dtypes and class names in messages."""

import reprlib
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
    brief = _Repr()
    brief.maxlevel, brief.maxlist, brief.maxtuple, brief.maxset, brief.maxdict = 3, 8, 8, 8, 6
    brief.maxstring = brief.maxlong = brief.maxother = longest
    return brief.repr(value)


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def with_article(noun: str) -> str:
    """``"EagleHead"`` -> ``"an EagleHead"``."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def how_to_import(source: str) -> str:
    """The command that imports ``source``, if that is a head in the form of its authors."""
    return (
        "A released EAGLE head or Kangaroo adapter is imported first: python -m drafters.convert "
        f"{source} --target MODEL --out FOLDER (of Kangaroo with --exit-layer N)"
    )


class _Repr(reprlib.Repr):
    def repr_int(self, number: int, level: int) -> str:
        try:
            return super().repr_int(number, level)
        except ValueError:  # Python refuses to write out more than some thousand digits
            return f"a number of about {number.bit_length() * 3 // 10:,} digits"
