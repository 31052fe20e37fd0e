"""Training of learned drafters."""

from pathlib import Path

# Until the next release, `python -m train.summary` and the like are still found: they moved to train/tools.
__path__.append(str(Path(__file__).with_name("tools")))
