"""train.start: inspect, measure, plan, write the configs and one script of plain commands; run the script."""

import os
import shlex
import sys
from pathlib import Path

from huggingface_hub import get_token
from rich.console import Console
from rich.table import Table

from data_prep.common.disk import check_room
from drafters.common.files import replace_json, replace_text
from drafters.common.provenance import cpu_name
from drafters.common.wording import size_text
from drafters.model.ends import load_frozen_ends
from train.configs import START_FACTS, START_SCRIPT, StartConfig
from train.plan.configs import page_text
from train.plan.facts import Machine, Model, Rates, look_at_data, look_at_machine, look_at_model
from train.plan.rates import measure, unmeasured
from train.plan.shares import check_minutes
from train.plan.steps import Plan, Planner


def write(config: StartConfig, command: list[str], run: bool) -> None:
    """Inspect and measure, then write the configs, the script and the facts that they depend on.

    Args:
        command: the command line of train.start. run: the script runs afterwards.

    Raises:
        ValueError: an error that would otherwise end a step hours later; then nothing is written.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    model = look_at_model(config.target)
    load_frozen_ends(config.target, device="meta")  # checks the tensors' names and format
    data = None if config.data is None else look_at_data(config.data, model)
    machine = look_at_machine(config.out)
    console.print(f"{config.target}: {shape(model)}")
    if data is not None:
        whose = "the target's own answers" if data.own else "others' answers: the target will give its own"
        size = f"{data.turns:,} turns, about {data.tokens / 1e6:,.2f}M tokens"
        console.print(f"{config.data}: {data.read}; {size}; {whose}")
    check_minutes(config, model, data, unmeasured(), so_far=True)
    console.print(f"this machine: {place(machine)}; measuring")
    rates, data = measure(config, model, machine, data)
    if data.asking is not None:
        console.print(data.read)
    plan = Planner(model, data, machine, rates, config).make()
    disk = sum(step.disk for step in plan.steps)
    check_room(config.out, disk, f"--out {config.out}", "give a folder on another disk")
    if config.hub and not get_token():
        plan.notes.append(f"no Hub token: run `hf auth login` before the last step, which pushes to {config.hub}")
    save(config, plan, rates, command)
    show(plan, console)
    file = config.out / START_SCRIPT
    what = "it starts now" if run else f"run it: bash {shlex.quote(str(file))}"
    console.print(f"{file} and {len(plan.files)} configs are written; {what}")


def save(config: StartConfig, plan: Plan, rates: Rates, command: list[str]) -> None:
    """Write all files of a start, the script last, which marks it as complete."""
    (config.out / "configs").mkdir(parents=True, exist_ok=True)
    replace_json(config.out / START_FACTS, {"settings": config.settings(), "rates": vars(rates)})
    for file, page in plan.files.items():
        user = next(line for step in plan.steps for line in step.commands if f"configs/{file}" in line)
        title = f"{file.removesuffix('.yaml')}, by train.start"
        replace_text(config.out / "configs" / file, page_text(title, user.split(" $(")[0], page))
    replace_text(config.out / START_SCRIPT, script(plan, command))
    (config.out / START_SCRIPT).chmod(0o755)


def shape(model: Model) -> str:
    """The model in one line."""
    config = model.config
    return (
        f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}, vocabulary "
        f"{config.vocab_size:,}, dialogues of up to {model.longest:,} tokens"
    )


def place(machine: Machine) -> str:
    """The machine in one line."""
    what = f"{machine.gpus} GPUs" if machine.gpus else f"{cpu_name()}, {machine.cores} cores"
    free = f"{size_text(machine.memory)} of memory and {size_text(machine.disk)} of disk free"
    return f"{what}, {machine.dtype}, {free}"


def run_script(config: StartConfig) -> None:
    """Replace this process by the script, so that Ctrl-C reaches the running step and no memory stays in use."""
    sys.stdout.flush()
    os.execvp("bash", ["bash", str(config.out / START_SCRIPT)])


def script(plan: Plan, command: list[str]) -> str:
    """``run.sh``: a finished step leaves ``.done`` in its folder and does not run again."""
    total = sum(step.seconds for step in plan.steps)
    lines = [
        "#!/usr/bin/env bash",
        f"# Written by: {shlex.join(command)}",
        f"# About {minutes(total)} in all. A finished step leaves .done in its folder and does not run again; an",
        "# interrupted step continues. If you change a config, delete the folders made with the old one.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
    ]
    for number, step in enumerate(plan.steps, start=1):
        done = shlex.quote(f"{step.done}/.done")
        sizes = {"disk": step.disk, "memory": step.memory}
        needed = "".join(f", {size_text(size)} of {what}" for what, size in sizes.items() if size)
        lines += [
            "",
            f"# {number}. {step.name}: about {minutes(step.seconds)}{needed}",
            f"# ({step.how})",
            f"if [ ! -e {done} ]; then",
            f'  echo "== $(date +%H:%M) {number} of {len(plan.steps)}: {step.name}, about {minutes(step.seconds)}"',
            *(f"  {line}" for line in step.commands),
            f"  touch {done}",
            "fi",
        ]
    return "\n".join([*lines, "", f'echo "== $(date +%H:%M) finished:" {shlex.quote(plan.report)}', ""])


def minutes(seconds: float) -> str:
    """Time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def show(plan: Plan, console: Console) -> None:
    """The table of the steps."""
    table = Table("step", "minutes", "disk", "memory", "estimated from")
    for column in table.columns[1:4]:
        column.justify, column.no_wrap = "right", True
    for step in plan.steps:
        sizes = [size_text(size) if size else "" for size in (step.disk, step.memory)]
        table.add_row(step.name, f"{step.seconds / 60:.1f}", *sizes, step.how)
    total = sum(step.seconds for step in plan.steps) / 60
    disk = sum(step.disk for step in plan.steps)
    table.add_section()
    table.add_row("all", f"{total:.1f}", size_text(disk), size_text(max(step.memory for step in plan.steps)), "")
    console.print(table)
    for note in plan.notes:
        console.print(note, style="yellow")
