"""The front page: its examples run, its links exist, and its figures are the measured ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafters import drafter_class
from drafters.methods import method_names
from drafters.policy.costs import Curve
from drafters.policy.shape import Costs, ShapePolicy
from eval.figures.metrics import ends_in_loop

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
RESULTS = ROOT / "docs" / "results" / "2-core-cpu"
LINK = re.compile(r"\]\((?!#|[\w+.-]+://)([^)\s#]+)")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name / "report.json").read_text())
    return found


def test_the_first_python_example_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an example that fails, drafts nothing, or whose answer is an endless loop."""
    (code,) = re.findall(r"^## Use a drafter from Python\n```python\n(.*?)^```", README, re.M | re.S)
    monkeypatch.chdir(ROOT)
    costs = Costs(Curve((1, 64), (1.0, 1.5)), first=0.1, level=0.1, row=0.01)  # drafts are profitable
    monkeypatch.setattr(ShapePolicy, "_measured", lambda *given: costs)
    names: dict[str, Any] = {}
    exec(code, names)
    tokens = names["result"].tokens[0].tolist()
    assert not ends_in_loop(tokens)
    assert tokens[-1] == names["tokenizer"].convert_tokens_to_ids("<|end|>")
    assert 8 < len(tokens) < 128 and names["result"].trace.tau > 1.2
    assert "is a directory" in capsys.readouterr().out


def texts(value: Any) -> list[str]:
    """Every string in a config."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_the_quickstart_makes_the_corpus_that_all_configs_read() -> None:
    """Catches configs that find no prompt file after the quickstart."""
    (made,) = re.findall(r"^CORPUS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert f"python -m data_prep.stdlib_corpus --out {made} " in README
    read = [text for path in CONFIGS for text in texts(yaml.safe_load(path.read_text())) if text.endswith(".jsonl")]
    corpus = [Path(text) for text in read if Path(text).parent.name == "stdlib"]
    assert len(corpus) > 20
    assert {str(file.parent) for file in corpus} == {made}


def test_the_table_of_a_real_model_is_its_report() -> None:
    """Catches a slip of the pen, and a trained head without the retrieval drafter that beats it."""
    rows = {row["drafter"]: row for row in report("smollm2/spec_bench_256")["rows"]}
    names = ("multi-turn conversation", "math_reasoning", "qa", "rag", "summarization", "translation")
    labels = {
        "**hybrid** of both": "hybrid: lookup and EAGLE",
        "**EAGLE, auto**": "EAGLE, auto",
        "suffix decoding": "suffix decoding",
        "prompt lookup": "prompt_lookup",
    }
    assert {*labels.values()} == rows.keys() - {"autoregressive"}
    figures = {
        title: [rows[label]["speedup"], *(rows[label]["categories"][name]["speedup"] for name in names)]
        for title, label in labels.items()
    }
    best = [max(column) for column in zip(*figures.values(), strict=True)]
    for title, values in figures.items():
        cells = [
            f"**{value:.2f}**" if value == top else f"{value:.2f}" for value, top in zip(values, best, strict=True)
        ]
        cells[0] += " ({:.2f} to {:.2f})".format(*rows[labels[title]]["speedup_ci"])
        assert f"| {title} | {' | '.join(cells)} |" in README


def test_the_table_of_methods_is_complete_and_measured() -> None:
    """Catches a method that the table forgets, a lossy one that is not marked, and figures that are in no report."""
    measured = report("speed-bf16")
    assert f"{measured['environment']['prompt_set']['prompt_tokens']['mean']:.0f} tokens on average" in README
    rows = {row["drafter"]: row for row in measured["rows"] if row["temperature"] == 0}
    labels = {
        "hybrid": "hybrid, auto", "eagle": "EAGLE, chain", "eagle3": "EAGLE-3.1, chain", "dflash": "DFlash, chain",
        "dspark": "DSpark, chain", "kangaroo": "Kangaroo", "suffix": "suffix decoding",
        "prompt_lookup": "prompt lookup", "cascade": "cascade 0.9M -> 2M -> 7.8M", "ouroboros": "Ouroboros",
        "llmcad": "LLMCad", "specinfer": "SpecInfer", "bild": "BiLD", "mjsd": "MJSD",
    }  # fmt: skip
    methods = set(method_names()) - {"replay"}
    for name, line in re.findall(r"^\| `(\w+)` \|(.*)$", README.split("## Methods")[1], re.M):
        _, _, output, *figures = (cell.strip() for cell in line.split("|")[:5])
        methods.remove(name)
        assert ("**lossy**" in output) == (not drafter_class(name).lossless or name == "medusa"), name
        row = rows.get(labels.get(name, name))
        assert figures == ([f"{row['tau']:.2f}", f"{row['speedup']:.2f}"] if row else ["", ""]), name
    assert not methods


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row of the report, formatted as the page's columns."""
    interval = "" if row["tau"] == 1 else " ({:.2f} to {:.2f})".format(*row["speedup_ci"])
    return {
        "tau": f"{row['tau']:.2f}",
        "tau, no loops": f"{row['tau_without_loops']:.2f}",
        "tokens/s": f"{row['tokens_per_second']:.0f}",
        "speedup (95% interval)": f"{row['speedup']:.2f}{interval}",
        "speedup, no loops": f"{row['speedup_without_loops']:.2f}",
        "overhead": f"{row['overhead']:.1%}",
    }


def test_the_table_of_results_is_its_report() -> None:
    """Catches a table of an earlier run beside a newer report, a slip of the pen, and a lossy row that says nothing."""
    measured = report("speed-bf16")
    rows = {row["drafter"].lower(): row for row in measured["rows"] if row["temperature"] == 0}
    rows["plain decoding"] = rows.pop("autoregressive")
    lines = (ROOT / "docs" / "results.md").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| drafter | tau"))
    names = [name.strip() for name in lines[start].split("|")[2:-1]]
    for line in lines[start + 3 :]:  # below the rule and stock `generate`
        if not line.startswith("|"):
            break
        label, *cells = (cell.strip() for cell in line.replace("**", "").split("|")[1:-1])
        key = max((key for key in rows if label.lower().startswith(key)), key=len)
        row = rows.pop(key)
        assert dict(zip(names, cells, strict=True)) == {name: shown(row)[name] for name in names}, label
        assert row["lossless"] or f"lossy: perplexity {row['perplexity']:.2f}" in label
    assert not rows
    baseline = measured["baseline"]
    speed, share = baseline["stock_generate_tokens_per_second"], 1 / baseline["over_stock_generate"]
    assert [cell.strip() for cell in lines[start + 2].split("|") if cell.strip()][1:] == [
        f"{speed:.0f}",
        f"{share:.2f}",
    ]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(" +", "-", re.sub(r"[^\w\- ]", "", title).lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}")
def test_links_and_configs_of_a_page_exist(page: Path) -> None:
    """Catches a link, an anchor or a config that was moved or renamed, and a page that the index of docs/ forgets."""
    text = page.read_text()
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    anchors = re.findall(r"\]\(([\w./-]+\.md)#([\w-]+)\)", text)
    assert not [(file, anchor) for file, anchor in anchors if anchor not in headings(page.parent / file)]
    if page.name != "CONTRIBUTING.md":  # whose example has its own config
        assert not [name for name in re.findall(r"configs/[\w./-]+\.\w+", text) if not (ROOT / name).is_file()]
    if page.parent.name == "docs" and page.name != "README.md":
        assert f"]({page.name})" in (ROOT / "docs" / "README.md").read_text()
        assert len(text.splitlines()) <= 150


def test_results_are_what_pages_quote() -> None:
    """Catches reports that no page links, and results that grow without limit."""
    quoted = {(page.parent / link).resolve() for page in PAGES for link in LINK.findall(page.read_text())}
    quoted.remove(RESULTS.parent)
    assert not [path for path in RESULTS.rglob("*.json") if quoted.isdisjoint([path, *path.parents])]
    everything = [path for path in RESULTS.parent.rglob("*") if path.is_file()]
    assert len(everything) <= 150 and sum(path.stat().st_size for path in everything) <= 5e6


def test_the_front_page_is_short() -> None:
    """Catches a front page that grows back into a manual."""
    assert len(README.splitlines()) < 130
