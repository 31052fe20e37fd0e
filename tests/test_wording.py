"""How messages put sizes, long values and class names."""

import pytest

from drafters.common.wording import shortened, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "1 byte"),
        (999, "999 bytes"),
        (999_600, "1.00 MB"),
        (45_678_900, "45.7 MB"),
        (1.5e18, "1,500 PB"),
    ],
)
def test_size_text(size: float, text: str) -> None:
    """Catches 0.00 GB for what has megabytes, and 1000 MB where the rounding reaches the next unit."""
    assert size_text(size) == text


def test_shortened() -> None:
    """Catches a value whose quotation fills the screen, or that Python refuses to write out at all."""
    assert shortened("many") == "'many'"
    assert len(shortened("0" * 5000)) <= 102
    assert shortened(list(range(40))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert shortened(10**5000) == "a number of about 4,983 digits"
