"""Reports and certificates: with any content, their readers refuse them by name or read them."""

import json
from pathlib import Path

import pytest

from drafters.hub.reports import Certificate, Part, Report, read

ROOT = Path(__file__).parents[1]
SCHEMAS: dict[str, type[Part]] = {"report.json": Report, "lossless.json": Certificate}


@pytest.mark.parametrize(("name", "schema"), [*SCHEMAS.items()])
def test_committed_results_are_read(name: str, schema: type[Part]) -> None:
    """Catches a schema that refuses the reports of an earlier version, or changes what it read."""
    found = [*(ROOT / "docs" / "results").rglob(name)]
    assert found
    for file in found:
        assert read(file, schema) == json.loads(file.read_text()) == read(file.parent, schema)
