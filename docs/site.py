"""Hooks of mkdocs.yml: add pages from outside of docs/, and a reference page for each module."""

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGES = ("drafters", "data_prep", "train", "eval")
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
}
SECTION = re.compile(r"^## (.*)\n((?:\|.*\n)+)", re.M)  # of docs/README.md: heading and table
ROW = re.compile(r"^\| \[[^]]*\]\(([\w-]+\.md)\)", re.M)
LINK = re.compile(r"(!?\[[^]]*\])\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Set the menu: the front page, the sections of docs/README.md, the reference by package."""
    sections = SECTION.findall((ROOT / "docs" / "README.md").read_text())
    reference = [{package: [f"api/{name}.md" for name in modules(package)]} for package in PACKAGES]
    config.nav = [
        {"drafters": "index.md"},
        *({title: ROW.findall(table)} for title, table in sections),
        {"Reference": reference},
        "contributing.md",
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add files from outside of docs/: the front page, the reference's pages, and all that pages link to."""
    for source, page in (("README.md", "index.md"), ("CONTRIBUTING.md", "contributing.md")):
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for package in PACKAGES:
        for name in modules(package):
            files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    known = {file.src_uri for file in files}
    sources = [
        (file.src_uri, file.content_string) for file in files.documentation_pages() if "api/" not in file.src_uri
    ]
    for page, text in sources:
        for _, link in LINK.findall(text):
            path = place(page, link)
            found = f"checkout/{path}"
            if not path.startswith("docs/") and path not in PAGES and found not in known and (ROOT / path).is_file():
                known.add(found)
                files.append(File.generated(config, found, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links for the site. A link to a folder becomes its text."""
    here = page.file.src_uri
    if here.startswith("api/"):
        return markdown

    def moved(found: re.Match[str]) -> str:
        text, link = found.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return found.group()
        path, anchor = place(here, link), link.partition("#")[2]
        if not (ROOT / path).is_file():  # a folder, or a file of a report that is not committed
            return "" if text.startswith("!") else text[1:-1]
        inside = path.removeprefix("docs/")
        target = PAGES.get(path) or (inside if inside != path else f"checkout/{path}")
        relative = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"{text}({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(moved, markdown)


def place(page: str, link: str) -> str:
    """Return the path in the checkout that a page's link leads to."""
    origin = {"index.md": "", "contributing.md": ""}.get(page, f"docs/{posixpath.dirname(page)}")
    return posixpath.normpath(posixpath.join(origin, link.partition("#")[0]))


def modules(package: str) -> list[str]:
    """Return the public modules of a package, itself first."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(PurePosixPath(path.relative_to(ROOT)).with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names if "._" not in name.removesuffix(".__init__"))
