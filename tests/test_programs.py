"""What every program does with a mistyped command line, and how it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafters.methods import method_names
from train.configs import schema_of, trained_methods

ROOT = Path(__file__).parents[1]

TARGET = "checkpoints/stdlib-target"
SPEED: dict[str, Any] = {
    "target": {"path": TARGET},
    "prompts": {"file": "prompts.jsonl"},
    "drafters": [{"drafter": "prompt_lookup"}],
    "out": "out",
}
FEATURES = {"target": TARGET, "splits": {"train": "prompts.jsonl"}, "out": "out"}
TRAIN = {"target": TARGET, "features": "features", "out": "out", "steps": 2, "batch_tokens": 64, "learning_rate": 1e-3}
CONFIGS: dict[str, dict[str, Any]] = {
    "eval.speed": SPEED,
    "eval.sweep": SPEED | {"vary": {"max_new_tokens": [4, 8]}},
    "eval.engines": SPEED | {"engines": [{"label": "vLLM", "engine": "vllm"}]},
    "eval.tune": SPEED | {"temperatures": [0.0], "knobs": {"max_draft": [2, 4]}},
    "data_prep.features": FEATURES,
    "data_prep.regenerate": {"target": TARGET, "source": "prompts.jsonl", "out": "new.jsonl"},
    "data_prep.magpie": {"target": TARGET, "out": "asked.jsonl", "count": 4},
    "train.tools.boost": {
        "run": str(ROOT / "configs/draft_model/stdlib.yaml"),
        "draft_models": ["a", "b"],
        "out": "out",
    },
    "train/draft_model.py": TRAIN | {"draft_model": "checkpoints/stdlib-draft"},
}
NO_FOLDER = "there is no folder|folders do not exist"
EAGLE = "checkpoints/stdlib-eagle"
ADAPTED = ["--drafter", EAGLE, "--traffic", "prompts.jsonl"]
GATED = ["--target", TARGET, "--drafter", EAGLE, "--traffic", "prompts.jsonl", "--out", "x"]
# A program's arguments, besides those that all configs share, and what the last line says.
MISTAKES: dict[str, list[tuple[list[str], str]]] = {
    "eval.speed": [
        (["target.path=./none"], NO_FOLDER),
        (["prompts.file=none.jsonl"], "no prompt file at none.jsonl"),
        (["max_new_tokens=many"], "max_new_tokens: .*found 'many'"),
        (['drafters=[{"drafter": "ouroborus"}]'], "did you mean 'ouroboros'"),
        (["--suite", "gsm9k"], "no suite 'gsm9k'; did you mean 'gsm8k'"),
    ],
    "eval.sweep": [(["target.path=./none"], NO_FOLDER), (['vary={"seeed": [1]}'], "did you mean 'seed'")],
    "eval.engines": [
        (["target.path=./none"], NO_FOLDER),
        (['engines=[{"label": "E", "engine": "ollama"}]'], "engine: .*found 'ollama'"),
        (['engines=[{"label": "E", "engine": "llama_cpp", "gguf": "none.gguf"}]'], "gguf: there is no file none.gguf"),
    ],
    "drafters.chat": [
        (["--target", "./none", "--drafter", "none"], NO_FOLDER),
        (["--target", TARGET, "--drafter", "./none"], NO_FOLDER),
        (["--target", TARGET, "--drafter", "sufix"], "did you mean 'suffix'"),
        (["--target", TARGET, "--drafter", "suffix", "--temperature", "inf"], "should be a finite number"),
    ],
    "drafters.hub": [
        (["push", "./none", "user/d"], "no folder none; save the drafter first"),
        (["push", "checkpoints/stdlib-eagle", "../../x", "--dry-run"], "is no Hub repository name like 'user/my-"),
    ],
    "drafters.export": [
        (["./none", "--to", "vllm", "--out", "x"], "there is no folder ./none"),
        (["./none", "--to", "vllm", "--out", "checkpoints"], "--out checkpoints is not empty"),
        (["./none", "--to", "vllm"], "give CHECKPOINT --to official|vllm|sglang --out FOLDER, or --check FOLDER"),
        (["--check", "checkpoints/stdlib-eagle"], "is a drafter of this toolkit; export it first"),
    ],
    "drafters.stitch": [
        (["./none", "--out", "x"], "there is no folder ./none"),
        (["./none", "--out", "checkpoints"], "--out checkpoints is not empty"),
    ],
    "drafters.convert": [
        (["x", "--target", TARGET, "--out", "x", "--taps", "2,x"], "--taps: must be whole numbers with commas"),
        (["./none", "--target", TARGET, "--out", "x"], "source: there is no folder ./none"),
        (["checkpoints/stdlib-eagle", "--target", "./none", "--out", "x"], "--target: there is no folder ./none"),
        (
            ["checkpoints/stdlib-eagle", "--target", TARGET, "--out", "x"],
            "is a drafter of this toolkit; load_drafter reads",
        ),
    ],
    "eval.tune": [(["prompts.file=none.jsonl"], "no prompt file")],
    "eval.roofline": [
        (["--shape", "llama-6b"], "no shape 'llama-6b'; known: .*llama-7b"),
        (["--shape", "llama-5m", "contxt=4"], "did you mean 'context'"),
    ],
    "eval.lossless": [
        ([], "give --target and --drafter, or --config"),
        (["--target", TARGET, "--drafter", "ouroborus"], "did you mean 'ouroboros'"),
        (["--target", TARGET, "--drafter", "./none"], "./none is no folder of a trained drafter .FileNotFound"),
        (["--target", "./none", "--drafter", "lookahead"], NO_FOLDER),
        (["--target", TARGET, "--drafter", "lookahead", "prompts.file=none.jsonl"], "no prompt file"),
    ],
    "eval.parity": [
        (["--checkpoint", "./none", "--target", TARGET, "--engine", "ours"], "--checkpoint: there is no folder ./none"),
        (["--checkpoint", "checkpoints/stdlib-eagle", "--target", "./none", "--engine", "ours"], NO_FOLDER),
    ],
    "eval.load": [
        (["--prompts", "none.jsonl", "--endpoint", "http://localhost:1/v1"], "no prompt file at none.jsonl"),
        (
            ["--prompts", "prompts.jsonl", "--endpoint", "localhost:8000"],
            "endpoints.served is 'localhost:8000'",
        ),
        (
            ["--prompts", "prompts.jsonl", "--endpoint", "http://u:p@h/v1"],
            "endpoints.served: give the address without",
        ),
    ],
    "eval.compare": [
        (["none", "none"], "there is no none/report.json; give the folders of two reports"),
        (["none"], "there is no none; python -m eval.speed writes it"),
        (["none", "none", "--over", "x"], "--over compares trainings within one report"),
    ],
    "eval.gpu": [(["--only", "rooflines"], "--only: invalid choice: 'rooflines'")],
    "data_prep.features": [(["target=./none"], NO_FOLDER), (["splits.train=none.jsonl"], "no data file at none.jsonl")],
    "data_prep.regenerate": [
        (["source=none.jsonl"], "no data file"),
        (["target=./none"], NO_FOLDER),
        (["drafter.drafter=eagel"], "did you mean 'eagle'"),
    ],
    "data_prep.magpie": [(["target=./none"], NO_FOLDER), (["count=0"], "count: .*greater than or equal to 1")],
    "data_prep.split": [
        (["none.jsonl", "--out", "x"], "no data file at none.jsonl"),
        (["none.jsonl", "--out", "x", "--heldout", "0"], "--heldout: must be a whole number of at least 1, found .0."),
    ],
    "data_prep.datastore": [
        (["none.jsonl", "--target", TARGET, "--out", "x.safetensors"], "no data file at none.jsonl"),
        (["prompts.jsonl", "--target", "./none", "--out", "x.safetensors"], "there is no folder ./none"),
        (["prompts.jsonl", "--target", TARGET, "--out", "x"], "--out x does not end in .safetensors"),
    ],
    "data_prep.gguf": [
        (["none.gguf", "--out", "x"], "no file at none.gguf"),
        (["prompts.jsonl", "--out", "x"], "prompts.jsonl is no GGUF file"),
    ],
    "data_prep.inspect": [
        (["none"], "none"),
        (["none", "--sample", "0"], "--sample: must be a whole number of at least 1"),
    ],
    "data_prep.stdlib_corpus": [(["--out", "prompts.jsonl"], "prompts.jsonl is a file")],
    "train/eagle.py": [
        (["target=./none"], NO_FOLDER),
        (["features=./none"], "none"),
        (["--resume"], "--resume: there is no run at out"),
    ],
    "train/kangaroo.py": [(["exit_layer=0"], "exit_layer: ")],
    "train/medusa.py": [
        (["haeds=2"], "did you mean 'heads'"),
        (["own_lm_heads=true", "precision=bf16"], "set precision=float32 zero_stage=0 or own_lm_heads=false"),
    ],
    "train/draft_model.py": [
        (["draft_model=./none"], f"draft_model: .*{NO_FOLDER}"),
        (["loss_vocab=8"], "loss_vocab is 8, and the LM head is trained; set freeze_ends=true"),
        (["draft_vocab=8"], "draft_vocab is 8, .* python -m train.tools.draft_vocab"),
        (["zero_stage=3"], "zero_stage is 3, .* set 0, 1 or 2"),
    ],
    "train.tools.boost": [
        (["draft_models=[checkpoints/stdlib-draft, ./none]"], rf"draft_models\[1\]: .*{NO_FOLDER}"),
        (["run=none.yaml"], "no config file at none.yaml"),
        (["keep=2"], "keep: "),
    ],
    "train.tools.draft_vocab": [
        (["none", "--data", "prompts.jsonl", "--size", "8"], "none holds no config.json"),
        ([TARGET, "--data", "none.jsonl", "--size", "8"], "no data file at none.jsonl"),
    ],
    "train.tools.shallow": [
        ([TARGET, "--layers", "2-0", "--out", "x"], r"gives \[\]; name layers once, in their order"),
        (["./none", "--layers", "0", "--out", "x"], NO_FOLDER),
        ([TARGET, "--layers", "0", "--out", "features"], "features is not empty"),
        ([TARGET, "--layers", "0", "--out", "prompts.jsonl"], "prompts.jsonl is a file; give a folder"),
    ],
    "train.start": [
        (["--target", "./none", "--data", "prompts.jsonl", "--out", "x"], NO_FOLDER),
        (["--target", TARGET, "--data", "none.jsonl", "--out", "x"], "no data file at none.jsonl"),
        (["--target", TARGET, "--data", "prompts.jsonl", "--out", "features"], "holds files that no start has written"),
        (["--target", TARGET, "--data", "prompts.jsonl", "--out", "x", "--minutes", "0"], "minutes: .*greater than 0"),
    ],
    "train.adapt": [
        (["--target", "./none", "--out", "x", *ADAPTED], NO_FOLDER),
        (["--target", TARGET, "--out", "x", *ADAPTED, "--drafter", "./none"], NO_FOLDER),
        (["--target", TARGET, "--out", "x", *ADAPTED, "--traffic", "none.jsonl"], "no data file at none.jsonl"),
        (["--target", TARGET, "--out", "x", *ADAPTED, "--guard", "gsm9k"], "gsm9k is no file of prompts; .* gsm8k"),
        (["--target", TARGET, "--out", "features", *ADAPTED], "holds files that no adaptation has written"),
        (["--target", TARGET, "--out", "x", *ADAPTED, "--most-loss", "0"], "most_loss: .*greater than 0"),
    ],
    "data_prep.traffic": [
        (["none.jsonl", "--target", TARGET, "--out", "x"], "no data file at none.jsonl"),
        (["prompts.jsonl", "--target", "./none", "--out", "x"], NO_FOLDER),
        (["prompts.jsonl", "--target", TARGET, "--out", "x", "--chat-template", "y"], "--chat-template: no file y"),
    ],
    "eval.gate": [
        ([*GATED, "--traffic", "none.jsonl"], "no prompt file at none.jsonl"),
        ([*GATED, "--drafter", "./none"], NO_FOLDER),
        ([*GATED, "--guard", "gsm9k"], "no suite 'gsm9k'; did you mean 'gsm8k'"),
        ([*GATED, "--most-loss", "0"], "--most-loss: must be a number above 0"),
    ],
    "train.tools.calibrate": [
        (["--checkpoint", "none", "--features", "features"], "none holds no config.json"),
        (
            ["--checkpoint", "checkpoints/stdlib-eagle", "--features", "features", "--temperature", "-1"],
            "is -1.0; give 0",
        ),
    ],
    "train.tools.curve": [
        (["./none"], "there is no folder none; give the `out`"),
    ],
    "train.tools.candidates": [
        (["--checkpoint", "none", "--features", "features"], "none holds no config.json"),
        (["--checkpoint", "checkpoints/stdlib-eagle", "--features", "features", "--recall", "2"], "recall"),
    ],
    "train.tools.summary": [(["none"], "no training run to sum up in none")],
}
# How a program is told where to write, by its name: a file, or a folder.
FILES_WRITTEN = {
    "data_prep.datastore": ["prompts.jsonl", "--target", TARGET, "--out", "{}.safetensors"],
    "data_prep.regenerate": ["out={}"],
    "data_prep.magpie": ["out={}"],
    "drafters.hub": ["push", "checkpoints/stdlib-eagle", "user/d", "--card", "{}"],
}
FOLDERS_WRITTEN = {
    "eval.speed": ["out={}"],
    "eval.sweep": ["out={}"],
    "eval.engines": ["out={}"],
    "eval.tune": ["out={}"],
    "eval.roofline": ["--shape", "llama-5m", "out={}"],
    "eval.lossless": ["--target", TARGET, "--drafter", "lookahead", "out={}"],
    "eval.parity": ["--checkpoint", "checkpoints/stdlib-eagle", "--target", TARGET, "--engine", "ours", "out={}"],
    "data_prep.features": ["out={}"],
    "data_prep.split": ["prompts.jsonl", "--out", "{}"],
    "data_prep.stdlib_corpus": ["--out", "{}"],
    "drafters.export": ["checkpoints/stdlib-eagle", "--to", "vllm", "--out", "{}"],
    "drafters.convert": ["checkpoints/stdlib-eagle", "--target", TARGET, "--out", "{}"],
    "drafters.stitch": ["checkpoints/stdlib-eagle", "--target", TARGET, "--out", "{}"],
    "train.tools.boost": ["out={}"],
    "train.tools.shallow": [TARGET, "--layers", "0", "--out", "{}"],
    "train.start": ["--target", TARGET, "--data", "prompts.jsonl", "--out", "{}"],
    "train.adapt": ["--target", TARGET, *ADAPTED, "--out", "{}"],
    "data_prep.traffic": ["prompts.jsonl", "--target", TARGET, "--out", "{}"],
    "eval.gate": [*GATED, "--out", "{}"],
    **{f"train/{method}.py": ["out={}"] for method in trained_methods()},
}
for method in trained_methods():
    fields: dict[str, Any] = dict(schema_of(method).model_fields)
    fields |= fields.pop("head").annotation.model_fields if "head" in fields else {}
    needed = {key for key, field in fields.items() if field.is_required()}
    CONFIGS[f"train/{method}.py"] = TRAIN | dict.fromkeys(needed - TRAIN.keys(), 2)
    MISTAKES.setdefault(f"train/{method}.py", [(["steps=0"], "steps: ")])
for kind, written in (("file", FILES_WRITTEN), ("folder", FOLDERS_WRITTEN)):
    for program, arguments in written.items():
        for place in ("prompts.jsonl/x", "folder" if kind == "file" else "prompts.jsonl"):
            message = (
                "folder(.safetensors)? is a folder; give a file" if place == "folder" else "prompts.jsonl is a file"
            )
            MISTAKES[program].append(([argument.replace("{}", place) for argument in arguments], message))


@pytest.mark.parametrize("program", MISTAKES)
def test_mistakes_are_found_without_torch(program: str, tmp_path: Path) -> None:
    """Catches a mistyped key or path that is named only after 20 seconds of imports, or as a stack trace."""
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for folder in ("features/train", "features/heldout", "folder", "folder.safetensors"):
        (tmp_path / folder).mkdir(parents=True)
    cases, config = [(["--help"], "usage: ")], []
    if program in CONFIGS:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIGS[program]))
        config = ["--config", "run.yaml"]
        cases.append((["--config", "rum.yaml"], "no config file at rum.yaml; did you mean run.yaml"))
        key = next(iter(CONFIGS[program]))
        cases.append(([*config, f"{key}s=1"], f"unknown key '{key}s'; did you mean '{key}'"))
    cases += [([*config, *arguments], message) for arguments, message in MISTAKES[program]]
    path = str(ROOT / program) if program.endswith(".py") else program
    command = [sys.executable, str(ROOT / "tests" / "without_torch.py"), path, json.dumps([case for case, _ in cases])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (arguments, message), said in zip(cases, json.loads(done.stdout), strict=True):
        last = said.splitlines()[-1] if message != "usage: " else said
        assert re.search(message, last), f"{program} {arguments}: {said}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"prompts.jsonl", "checkpoints", "features", "folder", "folder.safetensors", *(["run.yaml"] if config else [])}
    )  # nothing was made on the way


def test_every_program_is_held_to_it() -> None:
    """Catches a new program that is left out above."""
    programs = set()
    for folder in ("drafters", "data_prep", "train", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            left_out = file.name.endswith("worker.py") or file.name in {
                "judged_program.py",  # as the workers, started by other programs
                "throughput.py",  # reads the task of the measured method
            }
            if '__name__ == "__main__"' in file.read_text() and not left_out:
                programs.add(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    assert programs == {name.removesuffix(".py").replace("/", ".") for name in MISTAKES}


def test_names_of_methods_are_those_of_the_classes() -> None:
    """Catches a method that the list of names misses, or a file in it that holds none; `import drafters` is fast."""
    import importlib
    import pkgutil

    import drafters
    import drafters.methods

    classes = set()
    for module in pkgutil.walk_packages(drafters.methods.__path__, "drafters.methods."):
        members = vars(importlib.import_module(module.name)).values()
        classes |= {
            v.name for v in members if isinstance(v, type) and v.__module__ == module.name and "name" in vars(v)
        }
    assert method_names() == sorted(classes)
    assert {"TargetModel", "generate", "load_drafter"} <= set(dir(drafters))
    with pytest.raises(AttributeError, match="no attribute 'Targetmodel'"):
        drafters.Targetmodel  # noqa: B018
