"""Decode with the drafter of this repository: model.generate(**inputs, custom_generate="...", trust_remote_code=True).

There this file is custom_generate/generate.py. All that it does is in the library `learned-drafters`.
"""

import sys
from typing import Any


def generate(model: Any, **options: Any) -> Any:
    """What ``generate`` without ``custom_generate`` returns, sooner; ``model`` is the drafter's target.

    Raises:
        ImportError: the library is missing or too old.
        ValueError: the drafter was trained for another model, or something is asked for that no draft can serve.
    """
    try:
        from drafters.for_transformers import generate_from
    except ImportError as error:
        raise ImportError(
            f"this drafter needs learned-drafters, 0.1.0 or newer ({error}): `pip install .` in its checkout. The "
            "distribution drafters of the package index is another project: `pip uninstall drafters`"
        ) from error
    # transformers does not say where it found this file. Its generate, which calls this, knows.
    where = sys._getframe(1).f_locals["custom_generate"]
    return generate_from(where, model, **options)
