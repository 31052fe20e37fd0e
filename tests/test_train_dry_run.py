"""--dry-run: what it finds, what it leaves alone, and how near its estimates are to what a run takes."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import memory_run
import nursery
import pytest
import recipes
import tiny
import tiny_run
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig

from data_prep.features import FeaturesConfig
from data_prep.store.quantise import token_bytes
from drafters import TargetModel
from drafters.config import load_config, validate
from train.cli import main
from train.core import losses
from train.core.config import TrainConfig
from train.core.task import task_class
from train.data.packing import TrainData
from train.eagle import EagleConfig
from train.kangaroo import KangarooConfig
from train.preflight import checks, estimate
from train.preflight.checks import Report
from train.preflight.dry_run import dry_run
from train.preflight.estimate import MicroBatch, memory_parts, meta_task, parameters, pass_memory, target_parameters
from train.run.files import run_folder_bytes
from train.run.inputs import open_inputs

ROOT = tiny_run.ROOT


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run")


TRACED: dict[str, dict[str, int]] = {}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of a pass takes most of a dry run, and most of these reports are of the same one: each is made once.

    (What it says is tested by name, ``pass_memory``, and never comes from here.)
    """

    def known(config: TrainConfig, target: PretrainedConfig, micro: MicroBatch, *given: Any, **named: Any) -> Any:
        left_out = {"target", "features", "out"}
        asked = [
            config.drafter,
            config.model_dump(mode="json", exclude=left_out),
            target.to_dict(),
            micro,
            given,
            named,
        ]
        key = repr(asked)
        if key not in TRACED:
            TRACED[key] = pass_memory(config, target, micro, *given, **named)
        return dict(TRACED[key])

    monkeypatch.setattr(estimate, "pass_memory", known)


def report_on(values: dict[str, Any], kind: str = "eagle", **given: Any) -> Report:
    return dry_run(tiny_run.read(kind, values), tiny_run.arguments(**given))


def test_a_run_that_can_start(settings: dict[str, Any], tmp_path: Path) -> None:
    """A dry run that starts DeepSpeed, makes the run folder, or ends with an error where there is none."""
    line = tiny_run.command("eagle", tmp_path, {**settings, "tau_every": 5}, "--dry-run", "--tokens-per-second", "100")
    code = """
import sys
from train.cli import main
from train.core.config import TrainConfig
status = main("eagle", sys.argv[1:])
assert "deepspeed" not in sys.modules
sys.exit(status)
"""
    done = tiny_run.run([line[0], "-c", code, *line[2:]], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Result: can start" in done.stdout
    assert "prompts for tau          there are" in done.stdout
    assert not Path(settings["out"]).exists()


def test_all_problems_at_once(settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One problem a run of the command, or an exit status of 0 for a run that cannot start."""
    out = Path(settings["out"])
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    tiny_run.command("eagle", tmp_path, {**settings, "features": str(tmp_path / "nowhere")})
    config = str(tmp_path / "run.yaml")
    assert main("eagle", ["--config", config, "--dry-run", "--tokens", "100_000"]) == 1
    text = capsys.readouterr().out
    assert "run folder" in text
    assert "is not empty and holds no state" in text
    assert len(re.findall(r"PROBLEM: no feature store at .*nowhere", text)) == 2
    assert "3 problem(s): the run cannot start like this" in text
    assert "drafter" in text.rpartition("In short:")[2]  # and estimates all the same


def test_features_of_another_target_are_found(settings: dict[str, Any], tmp_path: Path) -> None:
    """A fingerprint that is not compared because the weights are not read."""
    tiny.build("llama", seed=7).save_pretrained(tmp_path / "other")
    report = report_on({**settings, "target": str(tmp_path / "other")})
    assert any("fingerprint" in problem for problem in report.problems)
    assert not report_on(settings).problems


def test_a_target_in_the_hubs_cache(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of another target that go unnoticed because it lies in the cache; "ok" for what was not looked at."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, folder in (("right", Path(settings["target"])), ("wrong", tmp_path / "other")):
        if name == "wrong":
            tiny.build("llama", seed=7).save_pretrained(folder)
        repository = tmp_path / "hub" / f"models--some--{name}"
        shutil.copytree(folder, repository / "snapshots" / "abc")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
    report = report_on({**settings, "target": "some/right"})
    assert not report.problems
    assert re.search("target and features +target and exit layer are those of the features", report.text())
    assert re.search("not checked +.*: tokenizer not here", report.text())
    report = report_on({**settings, "target": "some/wrong"})
    assert any("fingerprint" in problem and "'some/wrong'" in problem for problem in report.problems)
    assert all(str(tmp_path / "hub") not in problem for problem in report.problems)
    (tmp_path / "hub" / "models--some--wrong" / "snapshots" / "abc" / "model.safetensors").unlink()
    report = report_on({**settings, "target": "some/wrong", "exit_layer": 4}, "kangaroo")
    assert re.search("not checked +.*: weights and tokenizer not here", report.text())
    assert [problem for problem in report.problems if "must be below the 4 layers" in problem]
    assert any(
        "neither a folder nor a repository" in text for text in report_on({**settings, "target": "a/b/c"}).problems
    )


def test_an_exit_layer_that_is_not_there(settings: dict[str, Any], tmp_path: Path) -> None:
    """Kangaroo from a layer past the end, or one that the store does not hold, found after the start only."""
    report = report_on({**settings, "exit_layer": 3}, "kangaroo")
    assert any("holds no hidden states after layer 3" in problem for problem in report.problems)
    report = report_on({**settings, "exit_layer": 4, "features": str(tmp_path)}, "kangaroo", tokens=1000)
    assert any("must be below the 4 layers" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("family", "kind", "changes", "said"),
    [
        ("llama", "eagle", {}, r"this toolkit, the official code, vLLM, SGLang \(layer: target\)$"),
        ("qwen3", "eagle", {}, r"this toolkit, the official code, vLLM, SGLang \(layer: llama\)$"),
        (
            "mixtral",
            "eagle",
            {},
            r"the official code, vLLM \(layer: target\); not by SGLang: it runs no targets of the fam",
        ),
        (
            "qwen3",
            "eagle",
            {"layer": "target"},
            r"this toolkit \(layer: target\); not by .* vLLM: its layer is that of the",
        ),
        ("llama", "eagle", {"fc_bias": True}, "not by vLLM: its fc has no bias"),
        ("llama", "eagle", {"inputs": "token"}, r"this toolkit \(layer: target\); not by .*: its inputs is 'token'"),
        ("llama", "kangaroo", {"exit_layer": 2}, "this toolkit, the official code; not by vLLM: it is of the method"),
        (
            "qwen3",
            "kangaroo",
            {"exit_layer": 2},
            "this toolkit; not by the official code: its layer is that of the fam",
        ),
        ("llama", "medusa", {}, "this toolkit; not by .* SGLang: it is of the method 'medusa'"),
    ],
)
def test_it_says_what_will_serve_the_drafter(
    family: str, kind: str, changes: dict[str, Any], said: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Catches a dry run that does not say that the export will refuse the head."""
    shape = tmp_path / "config.json"
    tiny.tiny_config(family, head_dim=12).to_json_file(shape)
    values = {**settings, "features": str(tmp_path), **changes}
    report = report_on(values, kind, target_config=str(shape))
    assert re.search(rf"^served by +.*{said}", report.text(), re.MULTILINE), report.text()


def test_nothing_to_estimate_from(settings: dict[str, Any], tmp_path: Path) -> None:
    """A stack trace, or a guess, where neither target nor data is known."""
    report = report_on({**settings, "target": str(tmp_path / "none")})
    assert "give --target-config" in report.text()
    assert not report.short
    report = report_on({**settings, "features": str(tmp_path)})
    assert "give --tokens N or --data FILE" in report.text()
    assert "memory" in report.short
    report = report_on({**settings, "features": str(tmp_path)}, data=str(tmp_path / "none.json"))
    assert any("no tokenizer to count with; give --tokens N" in problem for problem in report.problems)


def test_data_file_is_counted(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Tokens of the sample taken for those of the whole file."""
    turns = [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "A sequence. " * 20}]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"id": str(n), "conversations": turns}) + "\n" for n in range(600)))
    values = {**settings, "target": str(ROOT / "checkpoints" / "stdlib-target"), "features": str(tmp_path)}
    text = report_on(values, data=str(file)).text()
    tokens, trained = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:tokens an|of them)", text))
    assert tokens % 600 == 0
    assert 600 * 40 < trained < tokens < 600 * 200
    assert "600 dialogues" in text


def test_steps_are_those_of_the_run(settings: dict[str, Any]) -> None:
    """Steps of tokens / batch_tokens, which no shuffle of whole dialogues gives."""
    values = {**settings, "steps": None, "epochs": 1}
    config = validate(EagleConfig, values, source="test")
    data = TrainData(open_inputs(config).train, config)
    assert f"{data.steps_in(1):,} an epoch" in report_on(values).text()


def test_time(settings: dict[str, Any]) -> None:
    """Hours by an assumption that is not told, or at a rate that ignores the ranks."""
    given = {"device": "H200", "tokens": 1}
    one, two = (report_on(settings, ranks=ranks, **given).text() for ranks in (1, 2))
    rates = [int(re.search(r"training at ([\d,]+) tokens/s", text)[1].replace(",", "")) for text in (one, two)]  # type: ignore[index]
    assert rates[1] == pytest.approx(2 * rates[0], abs=2)
    assert "assuming an MFU of 40% of 989 TFLOP/s" in one
    assert "training at 50 tokens/s (as given" in report_on(settings, tokens_per_second=50.0).text()
    assert "unknown on cpu" in report_on(settings).text() or tiny_run.torch.cuda.is_available()
    assert re.search(r"tokens/s \(measured here", report_on(settings, measure=True).text())


@pytest.mark.slow
def test_estimates_against_a_run(tmp_path: Path) -> None:
    """Memory off by more than a third either way, or a state that takes more disk than was said (5% allowed).

    In float32, which every CPU is fast in: ``test_bytes_a_weight`` has what 16 bits change.
    """
    config = validate(EagleConfig, memory_run.settings(tmp_path), source="test")
    target = LlamaConfig(**memory_run.SHAPE)
    micro = MicroBatch(memory_run.DIALOGUES, memory_run.LENGTH)
    task = meta_task(config, target)
    expected = sum(memory_parts(config, task, 1).values())
    expected += pass_memory(config, target, micro)["pass"]
    log = tmp_path / "memory.log"
    assert nursery.run("memory_run.measure", str(tmp_path), tiny_run.environment(), log, 300) == 0, log.read_text()
    measured = json.loads(log.read_text().splitlines()[-1])
    assert expected == pytest.approx(measured["memory"], rel=0.33)
    count = parameters(task.module)
    state = (run_folder_bytes(count) - 4 * count) / 3
    assert state == pytest.approx(measured["state"], rel=0.05)


def test_memory_follows_the_config(settings: dict[str, Any]) -> None:
    """An estimate that does not know ranks, ZeRO stages, the loss's chunks or activation checkpointing."""
    target = LlamaConfig(**memory_run.SHAPE)

    def config(**changes: Any) -> EagleConfig:
        return validate(EagleConfig, {**settings, "precision": "bf16", **changes}, source="test")

    task = meta_task(config(), target)
    count = parameters(task.module)
    stages = [memory_parts(config(zero_stage=stage), task, 4) for stage in (0, 1, 2, 3)]
    assert [parts["Adam's moments"] for parts in stages] == [2 * count] * 4  # bf16 runs stage 0 as stage 1
    assert [parts["float32 masters"] for parts in stages] == [count] * 4
    assert [parts["weights"] for parts in stages] == [2 * count] * 3 + [count // 2]
    largest = 2 * target.hidden_size * target.intermediate_size // 2
    assert [parts["gradients"] for parts in stages] == [
        6 * count, 6 * count, count + 4 * largest, count + 4 * 50_000_000
    ]  # fmt: skip
    single = memory_parts(config(precision="float32"), task, 1)
    del single["embedding and LM head"]
    assert sum(single.values()) == 16 * count
    offloaded = memory_parts(config(zero_stage=3, offload="parameters"), task, 1)
    assert offloaded["weights"] == offloaded["Adam's moments"] == offloaded["float32 masters"] == 0
    micro = MicroBatch(4, 512)
    large, small = (pass_memory(config(loss_chunk_rows=rows), target, micro)["loss"] for rows in (1024, 256))
    assert 2.5 < large / small < 4.5
    whole, less = (pass_memory(config(), target, micro, checkpointing=on)["pass"] for on in (False, True))
    assert less < whole
    half = pass_memory(config(), target, MicroBatch(2, 512))["pass"]
    assert half < 0.7 * whole


def test_memory_with_default_chunks_is_the_devices(settings: dict[str, Any]) -> None:
    """A GPU's estimate with the small chunks of a CPU, where the config leaves their size open."""
    config = validate(EagleConfig, {**settings, "loss_chunk_rows": None}, source="test")
    target = LlamaConfig(**{**memory_run.SHAPE, "vocab_size": 32_000})
    losses = [pass_memory(config, target, MicroBatch(4, 512), on_gpu=on)["loss"] for on in (False, True)]
    given = [config.model_copy(update={"loss_chunk_rows": rows}) for rows in (64, 2097)]
    expected = [pass_memory(each, target, MicroBatch(4, 512))["loss"] for each in given]
    assert losses == expected


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16", "top_k_weight": 1.0}, {"classification_loss": "lk_lambda"}]
)
def test_two_chunks_are_as_large_as_all(
    settings: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak that the trace does not come to, because it leaves out what repeats."""
    config = validate(EagleConfig, {**settings, **changes}, source="test")
    target, micro = LlamaConfig(**memory_run.SHAPE), MicroBatch(2, 48)
    assert micro.tokens == 6 * (config.loss_chunk_rows or 0)
    few = pass_memory(config, target, micro)
    monkeypatch.setattr(estimate, "two_chunks_only", nullcontext)
    assert few == pass_memory(config, target, micro)
    monkeypatch.setattr(losses, "_most_chunks", 1)
    assert few != pass_memory(config, target, micro)


@pytest.mark.parametrize("share", [1.0, 0.62, 0.0])
def test_what_is_timed_is_trained_as_much_as_the_data(
    share: float, settings: dict[str, Any], target: TargetModel
) -> None:
    """Catches a rate measured with every position trained, where in dialogues two of five are questions: too low by a
    third where the LM head is most of the work."""
    batch = estimate.random_batch(validate(EagleConfig, settings, "test"), MicroBatch(3, 50), target.config, share)
    masks = batch.loss_mask.view(3, 50)
    assert masks.sum(1).tolist() == [max(round(share * 50), 1)] * 3
    assert (masks[:, 1:] >= masks[:, :-1]).all()  # answers stand behind their questions


@pytest.mark.parametrize("kind", ["eagle", "kangaroo", "medusa"])
def test_what_the_schema_leaves_open(kind: str, settings: dict[str, Any]) -> None:
    """A default that every test and recipe replaces, and with which neither an estimate nor a run works."""
    needed = {key: settings[key] for key in ("target", "features", "out", "batch_tokens", "learning_rate")}
    values = {**needed, "steps": 2, **({"exit_layer": tiny_run.TAP} if kind == "kangaroo" else {})}
    report = report_on(values, kind)
    assert not report.problems and report.memory["forward and backward"] > 0
    threads = tiny_run.torch.get_num_threads()
    try:
        tiny_run.train_here(kind, values)
    finally:
        tiny_run.torch.set_num_threads(threads)
    assert (Path(values["out"]) / "config.json").is_file()


def test_parameters_of_the_papers() -> None:
    """A head of another size than the paper's (section 4: 0.24B, 0.37B, 0.99B; Kangaroo: 67M at 4,096)."""
    eagle = load_config(EagleConfig, ROOT / "configs/eagle/vicuna-7b.yaml")
    kangaroo = load_config(KangarooConfig, ROOT / "configs/kangaroo/vicuna-7b.yaml")

    def shape(name: str) -> Any:
        return LlamaConfig(**json.loads((ROOT / "configs" / "shapes" / f"{name}.json").read_text()))

    def billions(config: Any, name: str) -> float:
        return round(parameters(meta_task(config, shape(name)).module) / 1e9, 2)

    assert billions(eagle, "vicuna-7b") == 0.24
    assert billions(eagle, "vicuna-13b") == 0.37
    assert billions(eagle, "llama2-70b-chat") == 0.99
    assert billions(kangaroo, "vicuna-7b") == 0.07
    totals = {"vicuna-7b": 6.7, "vicuna-13b": 13.0, "vicuna-33b": 32.5, "llama2-70b-chat": 69.0}
    assert {name: round(target_parameters(shape(name))[0] / 1e9, 1) for name in totals} == totals


def test_feature_bytes_equal_a_stores(settings: dict[str, Any], features: Path) -> None:
    """A store's size off by a tap or a dtype."""
    tokens = sum(tiny_run.LENGTHS["train"])
    shards = sum(file.stat().st_size for file in (features / "train").glob("*.safetensors"))
    estimated = tokens * token_bytes(tiny.HIDDEN_SIZE, 1, "float32")
    assert estimated == pytest.approx(shards, rel=0.02)


# ------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("file", recipes.recipes(), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_recipes_say_what_they_take(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures in a comment that its own command does not give (any more): python tests/recipes.py writes them anew."""
    monkeypatch.chdir(ROOT)
    lines, start, end = recipes.lines_of(file)
    report, expected = recipes.estimate(file)
    assert lines[start:end] == expected
    assert len(expected) == 6
    # Only what is not here yet may be missing: no misfit between the recipe and the target's shape.
    assert all(re.match(r"target: |train: |heldout: |disk: ", problem) for problem in report.problems), report.problems


def test_every_model_has_its_recipes() -> None:
    """A model of the papers without a recipe, a recipe whose features nothing makes, or an exit layer not stored."""
    wanted = {"vicuna-7b", "vicuna-13b", "vicuna-33b", "llama2-7b-chat", "llama2-13b-chat", "llama2-70b-chat"}
    wanted |= {"mixtral-8x7b-instruct", "llama3.1-8b-instruct", "qwen3-8b"}
    assert {file.stem for file in recipes.recipes() if file.parent.name == "eagle"} == wanted
    files = (ROOT / "configs" / "features").glob("*-sharegpt.yaml")
    made = {each.out: each for each in (load_config(FeaturesConfig, file) for file in files)}
    for file in recipes.recipes():
        config = load_config(task_class(file.parent.name).schema, file)
        source = made[str(config.features)]
        assert (source.target, source.revision) == (config.target, config.revision)
        assert config.betas == (0.9, 0.95)
        assert config.gradient_clipping == 0.5
        if isinstance(config, KangarooConfig):
            assert config.exit_layer == (3 if file.stem == "vicuna-13b" else 2)
            assert config.exit_layer in source.exit_layers
            assert (config.learning_rate, config.epochs) == (5e-5, 10)
        if isinstance(config, EagleConfig):
            assert (config.learning_rate, config.warmup_steps, config.classification_weight) == (3e-5, 2000, 0.1)
        assert (source.chat_template is not None) == ("vicuna" in file.stem)


def test_models_beside_the_target_are_what_their_files_say(tmp_path: Path) -> None:
    """Catches a draft model with a missing tensor, which the dry run passes and the run refuses."""
    tiny.build("llama").save_pretrained(tmp_path)
    assert checks.check_model(str(tmp_path)).model_type == "llama"
    weights = load_file(tmp_path / "model.safetensors")
    gone, _ = weights.popitem()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing: {gone}"):
        checks.check_model(str(tmp_path))
