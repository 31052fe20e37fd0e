"""Files replaced as a whole."""

import os
from pathlib import Path

import pytest

from drafters.common.files import replace_json, replace_text, replacing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that leaves half a file, no file, or a temporary one behind; or nobody told which file."""
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


def test_what_was_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """Catches a Ctrl-C that leaves a temporary file, or takes the half-written one for whole; and a NaN in JSON."""
    file = tmp_path / "state.json"
    replace_json(file, {"step": 1})
    with pytest.raises(KeyboardInterrupt), replacing(file) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace_json(file, {"loss": float("nan")})
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert file.read_text() == '{\n  "step": 1\n}\n'
