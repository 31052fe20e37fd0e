"""Files replaced as a whole."""

import os
from pathlib import Path

import pytest

from drafters.common.files import replace_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that leaves half a file, no file, or a temporary one behind, or does not say which file."""
    file = tmp_path / "state.json"
    replace_text(file, "öld")
    assert file.read_text(encoding="utf-8") == "öld"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*state\.json'"):
        replace_text(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert file.read_text(encoding="utf-8") == "öld"
