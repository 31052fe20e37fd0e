"""train.setup: what is wrong with a run's inputs is said before it starts."""

from pathlib import Path

import pytest
import tiny_run
from tiny import build

from drafters import TargetModel
from drafters.config import validate
from train.eagle import EagleConfig
from train.run.inputs import open_inputs


def test_a_misspelt_split_is_named(tmp_path: Path) -> None:
    """Catches a store called trian, made in hours, of which training says only that train is not there."""
    build("llama").save_pretrained(tmp_path / "target")
    target = TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    features = tiny_run.write_stores(tmp_path / "features", target, {"trian": [9, 17], "heldout": [15]})
    config = validate(EagleConfig, tiny_run.settings(target.name, features, tmp_path / "run"), source="test")
    with pytest.raises(ValueError, match=r"has no split train, but heldout, trian: training reads train/ and heldout/"):
        open_inputs(config)
    (features / "trian").rename(features / "train")
    assert len(open_inputs(config).train) == 2
