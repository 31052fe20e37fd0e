"""Fill the templates of the configs and of the script, which have the reason of each setting."""

import json
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def fill(template: str, values: dict[str, Any]) -> str:
    """Return a file of ``templates/`` with ``values``. In it ``yaml`` and ``sh`` quote, ``minutes`` shows seconds."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    made = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    made.filters |= {"yaml": _yaml, "sh": shlex.quote, "minutes": minutes}
    return made.get_template(template).render(values)


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def minutes(seconds: float) -> str:
    """Time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
