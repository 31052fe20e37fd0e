"""The documentation as a site: all pages and docstrings, without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Catches a broken link, a docstring that names a missing parameter, a module without a page, and a page that
    fetches something from the network."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in ("index", "smollm2", "contributing", "api/drafters.loop.generate", "api/data_prep.regenerate"):
        assert (tmp_path / f"{page}.html").is_file(), page
    assert "ValueError" in (tmp_path / "api" / "drafters.methods.eagle.html").read_text()
    modules = {path for path in (ROOT / "drafters").rglob("*.py") if not path.name.startswith("_")}
    assert len(list((tmp_path / "api").glob("drafters.*.html"))) > len(modules)  # packages have pages too
    fetched = re.compile(r'<(?:script|img)[^>]* src="https?://|<link[^>]*stylesheet[^>]*href="https?://')
    pages = [path for path in tmp_path.rglob("*.html") if fetched.search(path.read_text())]
    assert not pages
