"""Make ShareGPT dialogues from the source files of the installed Python standard library.

    python -m data_prep.stdlib_corpus --out runs/stdlib

The files are parsed with `ast`; nothing is downloaded or imported. The result is a corpus of prose and code with a
clear licence, on which a small target can be trained on a laptop.
"""

import ast
import contextlib
import hashlib
import json
import platform
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.common.disk import check_room
from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.common.files import check_folder, replace_json, replace_text

SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "pydoc_data",
    "turtledemo", "encodings", "ensurepip", "lib-dynload", "idle_test", "__phello__",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "__phello__", "config-", "_bootlocale")
HELDOUT_PER_MILLE = 40
TRAIN, HELDOUT, TUNE = "train", "heldout", "tune"
MIN_DOC, MIN_SOURCE = 24, 40

DOC_QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name} for?",
    "Describe the {kind} {name} of the Python standard library.",
    "Give me the documentation of {name}.",
)
SOURCE_QUESTIONS = (
    "Show the source of {name}.",
    "How is {name} implemented?",
    "Show me the code of the {kind} {name}.",
    "Write the {kind} {short} of {module}.",
)
METHOD_QUESTIONS = ("Which methods does {name} have?", "List the methods of the class {name}.")
THEN_SOURCE = ("Show me the source.", "How is it implemented?", "Can I see the code?")
THEN_DOC = ("What does it do?", "Explain what this code does.", "Describe it in words.")


@dataclass(frozen=True)
class StdlibObject:
    """A module, class or function of the standard library, with its documentation and source."""

    name: str
    module: str
    kind: str
    group: str  # its top-level object: the unit of the train / held-out split
    doc: str
    source: str
    methods: tuple[str, ...] = ()


def stable_hash(*parts: object) -> int:
    """A hash that is the same in every process, unlike the built-in `hash`."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def cut_text(text: str, limit: int) -> str:
    """The longest prefix of whole lines within `limit` characters, cut at a blank line if possible."""
    if len(text) <= limit:
        return text
    head = text[: limit + 1]
    blank, line = head.rfind("\n\n"), head.rfind("\n")
    cut = blank if blank >= limit // 2 else line
    return head[: cut if cut > 0 else limit].rstrip()


def read_objects(root: Path) -> Iterator[StdlibObject]:
    """Every object of the library below `root`, without tests, tools and files that cannot be parsed."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        names = [*parts[:-1], path.stem]
        if names[-1] in ("__init__", "__main__"):
            names.pop()
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            if names:
                yield from list(objects_of(".".join(names), path.read_text(encoding="utf-8")))


def _source_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).strip("\n")


def _clean_doc(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return (ast.get_docstring(node) or "").strip()


def objects_of(module: str, text: str) -> Iterator[StdlibObject]:
    """The module itself and its classes, methods and functions, in source order."""
    tree, lines = ast.parse(text), text.split("\n")  # not splitlines: for ast, a form feed does not end a line
    yield StdlibObject(module, module, "module", module, _clean_doc(tree), "")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in tree.body:
        if not isinstance(node, (*functions, ast.ClassDef)):
            continue
        name, kind = f"{module}.{node.name}", "class" if isinstance(node, ast.ClassDef) else "function"
        inner = [child for child in node.body if isinstance(child, functions)] if kind == "class" else []
        methods = tuple(dict.fromkeys(child.name for child in inner))
        yield StdlibObject(name, module, kind, name, _clean_doc(node), _source_of(node, lines), methods)
        # A class with one method has the same text as its method.
        for child in inner if len(inner) > 1 else ():
            about = _clean_doc(child), _source_of(child, lines)
            yield StdlibObject(f"{name}.{child.name}", module, "method", name, *about)


def dialogues_of(item: StdlibObject, seed: int, limit: int) -> Iterator[tuple[str, list[str]]]:
    """(kind, turns) of the dialogues about one object; turns alternate between the user and the assistant."""

    def pick(options: tuple[str, ...], salt: str) -> str:
        template, short = options[stable_hash(seed, item.name, salt) % len(options)], item.name[len(item.module) + 1 :]
        return template.format(name=item.name, kind=item.kind, short=short or item.name, module=item.module)

    doc, source = cut_text(item.doc, limit), cut_text(item.source, limit)
    has_doc, has_source = len(doc) >= MIN_DOC, len(source) >= MIN_SOURCE
    if len(item.methods) >= 3:
        listing = "\n".join(f"- {name}" for name in item.methods)
        yield "methods", [pick(METHOD_QUESTIONS, "methods"), cut_text(listing, limit // 2)]
    if has_source:
        yield "source", [pick(SOURCE_QUESTIONS, "source"), f"```python\n{source}\n```"]
    if not has_doc:
        return
    if not has_source or stable_hash(seed, item.name, "shape") % 2:
        yield "doc", [pick(DOC_QUESTIONS, "doc"), doc]
        return
    code = f"```python\n{cut_text(item.source, limit // 2)}\n```"
    if stable_hash(seed, item.name, "order") % 3:
        yield "doc+source", [pick(DOC_QUESTIONS, "doc"), doc, pick(THEN_SOURCE, "then"), code]
    else:
        yield "source+doc", [pick(SOURCE_QUESTIONS, "source2"), code, pick(THEN_DOC, "then"), doc]


def build_corpus(
    root: Path, max_dialogues: int | None = None, seed: int = 0, max_chars: int = 1600
) -> list[tuple[str, dict]]:
    """(split, ShareGPT record) for each dialogue, in a fixed shuffled order, without duplicates.

    The first ``max_dialogues`` are for training or held out, depending on their objects. Later dialogues about held-out
    objects without a held-out dialogue are for tuning: nothing is trained or measured on them.
    """
    if not root.is_dir():
        raise ValueError(f"no standard library at {root}; pass --stdlib the folder that holds ast.py")
    seen: dict[str, str] = {}
    records: list[tuple[str, dict]] = []
    groups: dict[str, str] = {}
    for item in read_objects(root):
        held_out = stable_hash("split", item.group) % 1000 < HELDOUT_PER_MILLE
        for kind, turns in dialogues_of(item, seed, max_chars):
            # The same text under two names (copied between modules) would be in both training and held-out data.
            answer = hashlib.sha256("\n".join(turns[1::2]).encode()).hexdigest()
            if seen.setdefault(answer, item.name) != item.name or (answer + kind) in seen:
                continue
            seen[answer + kind] = item.name
            names = ("human", "gpt")
            conversation = [{"from": names[i % 2], "value": turn} for i, turn in enumerate(turns)]
            record = {"id": f"{item.name}#{kind}", "source": f"python-stdlib/{item.module}", "category": kind}
            groups[record["id"]] = item.group
            records.append((HELDOUT if held_out else TRAIN, {**record, "conversations": conversation}))
    records.sort(key=lambda pair: (stable_hash(seed, "order", pair[1]["id"]), pair[1]["id"]))
    if not records:
        raise ValueError(f"no documented Python source below {root}")
    chosen = records[:max_dialogues]
    measured = {groups[record["id"]] for split, record in chosen if split == HELDOUT}
    rest = (record for split, record in records[len(chosen) :] if split == HELDOUT)
    return chosen + [(TUNE, record) for record in rest if groups[record["id"]] not in measured]


def write_corpus(out: Path, root: Path, max_dialogues: int | None = None, seed: int = 0, max_chars: int = 1600) -> dict:
    """Write train.jsonl, heldout.jsonl, tune.jsonl and manifest.json into `out`; return the manifest."""
    check_folder(out, "--out")
    records = build_corpus(root, max_dialogues, seed, max_chars)
    texts = dict.fromkeys((TRAIN, HELDOUT, TUNE), "")
    for split, record in records:
        texts[split] += json.dumps(record, ensure_ascii=False) + "\n"
    size = sum(len(text.encode("utf-8")) for text in texts.values())
    check_room(out, size, f"--out {out}", "give a folder on another disk")
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict = {"python": platform.python_version(), "seed": seed, "max_chars": max_chars, "files": {}}
    for name, text in texts.items():
        replace_text(out / f"{name}.jsonl", text)
        data = text.encode("utf-8")
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["files"][f"{name}.jsonl"] = {"dialogues": text.count("\n"), **facts}
    manifest["kinds"] = dict(sorted(Counter(record["category"] for _, record in records).items()))
    replace_json(out / "manifest.json", manifest)
    return manifest


def main(argv: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.stdlib_corpus", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="library to read")
    parser.add_argument("--max-dialogues", type=positive, default=13_000, help="for training and held out")
    parser.add_argument("--max-chars", type=positive, default=1600, help="longest answer; cut at a line")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse(argv)
    with keeping(lambda: f"to start again: {command()}"):
        manifest = write_corpus(args.out, args.stdlib, args.max_dialogues, args.seed, args.max_chars)
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    run_program(main)
