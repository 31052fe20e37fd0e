"""train.start: inspect, measure, plan, write the configs and one script of plain commands; run the script."""

import os
import shlex
import sys

from drafters.common.files import replace_json, replace_text
from drafters.common.wording import size_text
from drafters.model.ends import load_frozen_ends
from train.configs import START_FACTS, START_SCRIPT, StartConfig
from train.plan.facts import check_asks, look_at_data, look_at_machine, look_at_model, to_be_asked
from train.plan.fill import minutes
from train.plan.rates import measure, unmeasured
from train.plan.shares import check_minutes
from train.plan.steps import Planner


def write(start: StartConfig, command: list[str], run: bool) -> None:
    """Inspect and measure, then write the configs, the script and the facts that they depend on.

    Args:
        command: the command line of train.start. run: the script runs afterwards.

    Raises:
        ValueError: an error that would otherwise end a step hours later; then nothing is written.
    """
    model = look_at_model(start.target)
    load_frozen_ends(start.target, device="meta")  # checks the tensors' names and format
    data = None if start.data is None else look_at_data(start.data, model)
    machine = look_at_machine(start.out)
    if data is None:
        check_asks(model)
    else:
        whose = "the target's own answers" if data.own else "others' answers: the target will give its own"
        print(f"{start.data}: {data.read}; {data.turns:,} turns, about {data.tokens / 1e6:,.2f}M tokens; {whose}")
    check_minutes(start, model, data, unmeasured(), so_far=True)
    free = f"{size_text(machine.memory)} of memory and {size_text(machine.disk)} of disk free"
    print(f"this machine: {machine.device}, {machine.dtype}, {free}; measuring")
    rates = measure(start, model, machine, data)
    if data is None:
        data = to_be_asked(start.asked, start.minutes, model, rates)
        print(data.read)
    plan = Planner(start, model, data, machine, rates).make(command)
    (start.out / "configs").mkdir(parents=True, exist_ok=True)
    replace_json(start.out / START_FACTS, {"settings": start.settings(), "rates": vars(rates)})
    for name, text in plan.files.items():  # the script last, which marks the start as complete
        replace_text(start.out / name, text)
    script = start.out / START_SCRIPT
    script.chmod(0o755)
    for step, seconds in {**plan.seconds, "all": sum(plan.seconds.values())}.items():
        print(f"{step:>9}  about {minutes(seconds)}")
    for note in plan.notes:
        print(note)
    what = "it starts now" if run else f"run it: bash {shlex.quote(str(script))}"
    print(f"{script} and {len(plan.files) - 1} configs are written; {what}")


def run_script(start: StartConfig) -> None:
    """Replace this process by the script, so that Ctrl-C reaches the running step and no memory stays in use."""
    sys.stdout.flush()
    os.execvp("bash", ["bash", str(start.out / START_SCRIPT)])
