"""Suites whose questions are fetched from the Hub, by `datasets` itself, from a Hub on loopback (hub_server.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hub_server import HubServer, Repository

ROOT = Path(__file__).parents[1]
# What a user's own process does: the library reads where the Hub is when it is imported.
PROGRAM = """
import json, sys
from collections import Counter
from pathlib import Path
from eval.prompts.suites import read_suite, source
for name in sys.argv[1:]:
    try:
        found = read_suite(name, Path("nothing-here"), Counter())
        print(json.dumps([source(name, Path("nothing-here")), [
            [one.id, one.category, one.messages[-1]["content"], list(one.later), one.fields] for one in found]]))
    except ValueError as error:
        print(json.dumps([str(error), []]))
"""


def parquet(records: list[dict[str, Any]]) -> bytes:
    file = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return file.getvalue()


def card(**files: dict[str, str]) -> bytes:
    """A data set's README: its subsets, each with the files of its splits."""
    subsets = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in files.items()
    ]
    return f"---\n{json.dumps({'configs': subsets})}\n---\n".encode()


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """With three data sets, laid out as they are published."""
    with HubServer() as server:

        def holds(name: str, files: dict[str, bytes]) -> None:
            server.repositories[f"datasets/{name}"] = Repository(private=False)
            server.repositories[f"datasets/{name}"].commit(files, "data")

        turns = {"prompt_id": 81, "category": "writing", "prompt": ["Write w1.", "Now w2."], "reference": []}
        holds("HuggingFaceH4/mt_bench_prompts", {"raw/question.jsonl": json.dumps(turns).encode()})
        sums = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(3)]
        files = {
            f"main/{split}-00000-of-00001.parquet": parquet(sums[:last]) for split, last in (("train", 1), ("test", 3))
        }
        files["socratic/test-00000.parquet"] = parquet([{"question": "another subset", "answer": "#### 1"}])
        splits = {"train": "main/train-*", "test": "main/test-*"}
        holds("openai/gsm8k", {"README.md": card(socratic={"test": "socratic/test-*"}, main=splits), **files})
        pair = {"translation": {"de": "Guten Tag.", "en": "Good day."}}
        files = {"README.md": card(**{"de-en": {"test": "de-en/test-*"}}), "de-en/test-0.parquet": parquet([pair])}
        holds("wmt/wmt16", files)
        yield server


def read(hub: HubServer, folder: Path, *names: str, **more: str) -> list[Any]:
    """Of every suite where it was read from, and its questions."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", **more}
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_questions_come_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    """Catches another subset's or split's questions, later turns lost in a list that is Arrow's, a nested field that no
    template finds, and a second run that needs the network."""
    names = "mt-bench", "gsm8k", "wmt16-de-en"
    talks, sums, translated = read(hub, tmp_path, *names)
    assert talks[0] == "HuggingFaceH4/mt_bench_prompts (train)"
    assert [one[:4] for one in talks[1]] == [["81", "writing", "Write w1.", ["Now w2."]]]
    assert sums[0] == "openai/gsm8k (main, test)"
    assert [one[2] for one in sums[1]] == [f"What is {n} and {n}?" for n in range(3)]
    assert sums[1][2][4]["answer"] == "It is 4.\n#### 4"
    assert [one[2] for one in translated[1]] == ["Translate German to English: Guten Tag."]
    asked = len(hub.requests)
    assert read(hub, tmp_path, *names, HF_HUB_OFFLINE="1") == [talks, sums, translated]
    assert len(hub.requests) == asked
