"""The shipped searches and the table that takes over what they find: every method, never on the measured prompts."""

from pathlib import Path
from typing import Any

import yaml

from drafters.config import load_config
from eval.configs import SpeedConfig, TuneConfig
from eval.entries import DrafterEntry
from eval.tune import load_searches

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
HEADS = ("eagle3", "dflash", "dspark")  # their drafts are as long as in training; docs/results.md marks them
TABLE = CONFIGS / "speed" / "stdlib.yaml"
FOUND = ROOT / "docs" / "results" / "2-core-cpu" / "tune" / "tuned.yaml"
Key = tuple[str, float]  # label and temperature


def searches() -> dict[Key, TuneConfig]:
    configs = load_searches(CONFIGS / "tune", []).values()
    return {(config.drafters[0].base, config.temperatures[0]): config for config in configs}


def rows() -> dict[Key, DrafterEntry]:
    config = load_config(SpeedConfig, TABLE)
    return {(e.base, t): e for e in config.drafters for t in e.temperatures or config.temperatures}


def value_of(options: dict[str, Any], knob: str) -> Any:
    """A KeyError where the option is not set."""
    for key in knob.split("."):
        options = options[key]
    return options


def test_every_row_of_the_table_is_tuned() -> None:
    """Catches a strawman: a baseline at somebody's defaults beside methods whose settings were searched, settings of
    one temperature at the other, and rows that a search never saw."""
    tuned, shown = searches(), rows()
    assert len(tuned) >= 27
    as_published = {key for key in shown if "paper" in key[0] or "released" in key[0]}
    set_themselves = {key for key, entry in shown.items() if key[0].endswith(", auto") and "auto" in str(entry.options)}
    as_trained = {key for key, entry in shown.items() if entry.drafter in HEADS}
    untuned = as_published | as_trained | set_themselves | {("autoregressive", 0.0), ("autoregressive", 1.0)}
    assert set(shown) - untuned == set(tuned)
    for key, search in tuned.items():
        entry = shown[key]
        for knob, values in search.knobs.items():
            assert value_of(entry.options, knob) in values, f"{key}: {knob} is not one of the values searched"
        mine = {name: entry.options[name] for name in search.drafters[0].options if name != "inner"}
        assert mine == {k: v for k, v in search.drafters[0].options.items() if k != "inner"}
        assert entry.drafter == search.drafters[0].drafter
        assert (search.max_perplexity is not None) == (entry.drafter in ("bild", "mjsd"))
        assert all(len(values) > 1 for values in search.knobs.values())
    table = load_config(SpeedConfig, TABLE)
    for search in tuned.values():
        assert (search.target, search.top_k, search.top_p) == (table.target, table.top_k, table.top_p)


def test_the_table_has_the_settings_that_were_found() -> None:
    """Catches settings edited by hand after the search, or a second search whose result was not copied."""
    found = {(entry["label"], t): entry for entry in yaml.safe_load(FOUND.read_text()) for t in entry["temperatures"]}
    shown = rows()
    assert found.keys() == searches().keys()
    for key, entry in found.items():
        del entry["temperatures"]
        assert {"label": shown[key].base, "drafter": shown[key].drafter} | shown[key].options == entry


def test_nothing_is_tuned_on_what_is_measured() -> None:
    """Catches a search on the prompts of a table (that no dialogue is in two of the corpus' files is tested there),
    and a drafter trained on either."""
    measured, tuned = set(), set()
    for file in CONFIGS.rglob("*.yaml"):
        text = file.read_text()
        prompts = (yaml.safe_load(text) or {}).get("prompts")
        if prompts is None:
            assert "tune.jsonl" not in text, f"{file} reads the prompts kept for tuning"
        else:
            source = prompts.get("file") or prompts["suite"]
            (tuned if file.is_relative_to(CONFIGS / "tune") else measured).add(Path(source).name)
    assert tuned == {"tune.jsonl"} and "heldout.jsonl" in measured and not tuned & measured
