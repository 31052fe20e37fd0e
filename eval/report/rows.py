"""The rows of ``report.json``, and what must be said of them; how they are shown is ``eval.report.page``'s."""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

from drafters import TargetModel
from eval.figures import divergence, metrics
from eval.figures.metrics import joules_per_token, paired_speedup, typical_run
from eval.figures.quantisation import about_quantisation
from eval.measure.entries import STOCK
from eval.measure.runner import Run
from eval.prompts.prompts import Prompt


def make_rows(
    runs: list[Run],
    described: dict[str, dict[str, Any]],
    baseline_label: str,
    prompts: list[Prompt],
    judged: list[dict[str, Any]],
    seed: int,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report's ``baseline`` and ``rows``; needs no model.

    Args:
        described: the methods in their order, and what is known of them.
        judged: what the target says of every row's outputs; see ``eval.report.judged``.
    """
    by_key = rounds_by_key(runs, len(prompts))
    said = {(row["temperature"], row["batch"], row["drafter"]): row["figures"] for row in judged}
    rows, baselines = [], []
    for temperature, batch in dict.fromkeys((run.temperature, run.batch) for run in runs):
        plain = by_key[temperature, batch, baseline_label]
        stock = by_key.get((temperature, batch, STOCK))
        stock = stock if stock and _succeeded(stock) else None
        baselines.append(_baseline(temperature, batch, plain, stock))
        # Every method of that temperature against it, prompt by prompt.
        here: dict[str, dict[str, Any]] = {}
        for label, known in described.items():
            rounds = by_key.get((temperature, batch, label), [])
            if rounds and _succeeded(rounds):
                row: dict[str, Any] = {"drafter": label, "temperature": temperature, "batch": batch, **known}
                here[label] = row | _row(rounds, plain, prompts, seed) | said[temperature, batch, label]
        for label, row in here.items():
            if (best := _best_fixed(row, here.values())) is not None:
                over = paired_speedup(by_key[temperature, batch, label], by_key[temperature, batch, best], seed)
                row["over_best_fixed"] = {"drafter": best, "speedup": over.speedup, "speedup_ci": over.speedup_ci}
            rows.append(row)
    return {**baselines[0], "temperatures": baselines}, rows


Key = tuple[float, int, str]  # temperature, batch size, method


def rounds_by_key(runs: list[Run], prompts: int) -> dict[Key, list[list[Run]]]:
    """By method, then by prompt, or by batch of them: the rounds of each."""
    found: dict[Key, list[list[Run]]] = {}
    for run in runs:
        rounds = found.setdefault((run.temperature, run.batch, run.method), [[] for _ in range(0, prompts, run.batch)])
        rounds[run.prompt // run.batch].append(run)
    return found


def _succeeded(rounds: list[list[Run]]) -> bool:
    return all(run.failure is None for run in chain(*rounds))


def best_throughput(rows: list[dict[str, Any]], baseline: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each method the batch size of most tokens per second, and how that compares with plain decoding's best."""
    plain: dict[float, float] = {}
    for each in baseline["temperatures"]:
        plain[each["temperature"]] = max(plain.get(each["temperature"], 0.0), each["tokens_per_second"] or 0.0)
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        key = row["drafter"], row["temperature"]
        speed = row["tokens_per_second"]
        if speed is not None and speed > found.get(key, {"tokens_per_second": 0.0})["tokens_per_second"]:
            kept = {
                name: row[name]
                for name in ("drafter", "temperature", "batch", "lossless", "stock", "tokens_per_second")
            }
            found[key] = kept | {"over_plain": speed / plain[row["temperature"]]}
    return list(found.values())


def _best_fixed(row: dict[str, Any], others: Iterable[dict[str, Any]]) -> str | None:
    """Of a row that shapes its drafts by itself, the fastest of the same drafter that does not; None: there is none."""
    if "expected" not in row or "method" not in row:
        return None
    same = [
        one
        for one in others
        if "expected" not in one
        and one["speedup"] is not None
        and all(one.get(name) == row.get(name) for name in ("method", "trained", "lossless"))
    ]
    return max(same, key=lambda one: float(one["speedup"]))["drafter"] if same else None


def outputs_of(runs: list[Run]) -> list[Run]:
    """Of each prompt, where some were decoded together."""
    return [output for run in runs for output in run.outputs()]


def outputs_by_prompt(rounds: list[list[Run]]) -> list[list[Run]]:
    """The rounds of each prompt from those of each batch."""
    return [list(found) for of_batch in rounds for found in zip(*(run.outputs() for run in of_batch), strict=True)]


def failures(runs: list[Run], described: dict[str, dict[str, Any]], prompts: list[Prompt]) -> list[dict[str, Any]]:
    """The rows that have no figures, of methods that failed: the first prompt that each has no output of, and why."""
    first: dict[tuple[float, int, str], Run] = {}
    for run in runs:
        if run.failure is not None:
            first.setdefault((run.temperature, run.batch, run.method), run)
    return [
        {"drafter": run.method, "temperature": run.temperature, "batch": run.batch, **described[run.method]}
        | {"prompt": prompts[run.prompt].id, "round": run.round, "reason": run.failure}
        for run in first.values()
    ]


def _baseline(temperature: float, batch: int, plain: list[list[Run]], stock: list[list[Run]] | None) -> dict[str, Any]:
    """Plain decoding; of stock generate None where it was not measured."""
    typical = [typical_run(rounds) for rounds in plain]
    outputs = outputs_of(typical)
    exact = divergence.exact_share(outputs_by_prompt(stock), outputs) if stock and temperature == 0 else None
    return {
        "temperature": temperature,
        "batch": batch,
        "tokens_per_second": metrics.tokens_per_second(typical),
        "loop_share": len(_looping(outputs)) / len(outputs),
        "stock_generate_tokens_per_second": metrics.tokens_per_second([typical_run(each) for each in stock or ()]),
        "over_stock_generate": paired_speedup(plain, stock).speedup if stock else None,
        "stock_generate_joules_per_token": joules_per_token(list(chain(*stock)))["joules_per_token"] if stock else None,
        "stock_generate_exact_match": exact,
    }


def _looping(runs: list[Run]) -> set[int]:
    """The prompts on which these outputs end in a loop: a lossy or a sampled one may where plain decoding does not."""
    return {run.prompt for run in runs if metrics.ends_in_loop(run.tokens)}


def _row(rounds: list[list[Run]], plain: list[list[Run]], prompts: list[Prompt], seed: int) -> dict[str, Any]:
    typical = [typical_run(of_prompt) for of_prompt in rounds]
    outputs = outputs_of(typical)
    looping = _looping(outputs)
    steady = [place for place, run in enumerate(typical) if not any(one.prompt in looping for one in run.outputs())]
    row = metrics.acceptance(outputs, looping) | metrics.times(typical) | metrics.expected(typical)
    row |= joules_per_token(list(chain(*rounds))) | asdict(paired_speedup(rounds, plain, seed))
    row |= {
        "speedup_without_loops": _speedup_on(steady, rounds, plain),
        "loop_share": len(looping) / len(outputs),
        "by_context": metrics.by_context(outputs, [len(prompt.ids) for prompt in prompts]),
        "prompts": len(outputs),
        "new_tokens": sum(len(run.tokens) for run in typical),
        "decoded_tokens": sum(run.decoded_tokens for run in typical),
    }
    if len(outputs) > len(typical):
        return row  # a batch may hold several categories, whose times cannot be told apart
    kinds = {"categories": [p.category for p in prompts], "sub_categories": [p.sub_category for p in prompts]}
    for kind, of_prompts in kinds.items():
        for name in sorted({of for of in of_prompts if of is not None}):
            chosen = [place for place, of in enumerate(of_prompts) if of == name]
            row.setdefault(kind, {})[name] = {
                "prompts": len(chosen),
                "tau": metrics.acceptance([typical[place] for place in chosen], set())["tau"],
                "speedup": _speedup_on(chosen, rounds, plain),
            }
    return row


def _speedup_on(places: list[int], rounds: list[list[Run]], plain: list[list[Run]]) -> float | None:
    """The speedup over these prompts alone."""
    return paired_speedup([rounds[place] for place in places], [plain[place] for place in places]).speedup


def warnings(report: dict[str, Any]) -> list[str]:
    """What casts doubt on the figures: failed methods, a slow baseline, and what rounding does not explain."""
    lines = [
        f"{shown_name(row)}, {setting_of(row)}: no figures, for it failed on prompt {row['prompt']!r}: {row['reason']}"
        for row in report["failures"]
    ]
    for baseline in report["baseline"]["temperatures"]:
        ratio = baseline["over_stock_generate"]
        if ratio is not None and ratio < 1:
            lines.append(
                f"{setting_of(baseline)}: the baseline is slower than stock generate ({ratio:.2f} times its "
                f"speed): every speedup there is {1 / ratio:.2f} times what it is over stock generate"
            )
    for row in report["rows"]:
        found = row.get("divergences", {"count": 0})
        if not row["lossless"] or not found["count"] or row.get("engine"):  # another engine rounds otherwise
            continue
        if divergence.tail(found, row["prompts"]) is not None:
            continue
        count, fault = found["unexplained"], "more than rounding explains: a fault in the method or in the loop"
        if count is None:
            count, fault = found["count"], f"what rounding may or may not explain, unchecked ({found['unavailable']})"
        if count:
            lines.append(
                f"{row['drafter']}{_in_batch(row)} is lossless, but {count} of {row['prompts']} greedy outputs differ "
                f"from plain decoding's by {fault}"
            )
    return lines


def shown_name(row: dict[str, Any]) -> str:
    """The label, with its mark where the method is lossy, or transformers' own."""
    engine = f" ({row['engine']})" if row.get("engine") else ""
    return row["drafter"] + engine + (" (stock)" if row["stock"] else "") + ("" if row["lossless"] else " (lossy)")


def setting_of(row: dict[str, Any]) -> str:
    """The temperature, and the batch size where it is not 1."""
    return f"T = {row['temperature']:g}{_in_batch(row)}"


def _in_batch(row: dict[str, Any]) -> str:
    return f", batch {row['batch']}" if row["batch"] > 1 else ""


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A number as text; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def statements(report: dict[str, Any]) -> list[str]:
    """The prompts, the baseline's speed beside stock generate's, the loops, and the divergences."""
    facts = report["environment"]
    lines = [shortage] if (shortage := shortage_line(facts["prompt_set"])) else []
    lines += about_quantisation(facts)
    for baseline in report["baseline"]["temperatures"]:
        at = setting_of(baseline)
        line = f"{at}: plain decoding in this loop makes {number(baseline['tokens_per_second'], 1)} tokens/s"
        if (ratio := baseline["over_stock_generate"]) is not None:
            stock = number(baseline["stock_generate_tokens_per_second"], 1)
            line += f", {number(ratio, 2)} times stock generate's {stock}"
        lines.append(line)
        lines.append(
            f"{at}: {baseline['loop_share']:.1%} of plain decoding's outputs end in a loop (loops flatter every "
            "drafter; tau without them stands beside tau over all)"
        )
    lines += about_energy(facts["energy"])
    if _without_all_readings(report):
        lines.append("energy: rows without a figure have runs from a start that could not read the counters")
    started = [part["load_average"] for part in facts.get("parts", [facts])]  # of an interrupted report: every start
    busiest = max((load for load in started if load is not None), default=0.0)
    if busiest > facts["cpu_cores"]:
        lines.append(f"the machine was busy when runs began (load average {busiest:.1f}): times are rough")
    lines += [line for row in report["rows"] for line in _about_row(row, facts["dtype"])]
    for row in report.get("left_out", []):
        lines.append(
            f"{shown_name(row)}, {setting_of(row)}: not measured, it decodes at most {row['most']} row(s) at once"
        )
    return lines


def about_energy(energy: dict[str, Any]) -> list[str]:
    """How the joules were measured, or why they were not; ``energy`` is the meter's description."""
    names = {"device": "energy", "host": "energy of the host"}
    return [
        f"{name}: {'' if energy[place]['available'] else 'not available: '}{energy[place]['how']}"
        for place, name in names.items()
        if place in energy
    ]


def _without_all_readings(report: dict[str, Any]) -> bool:
    """Whether, in an interrupted report, the last start measured energy and a row has no figure all the same."""
    measured = report["environment"]["energy"].get("device", {}).get("available", False)
    return measured and any(row["joules_per_token"] is None for row in report["rows"])


def shortage_line(prompts: dict[str, Any]) -> str | None:
    """Says that fewer prompts are measured than the config asks for; None where they are not."""
    first = prompts["prompts"] - prompts.get("later_turns", 0)
    if prompts["requested"] is None or first >= prompts["requested"]:
        return None
    return (
        f"only {first} prompts are measured, not the {prompts['requested']} asked for: "
        f"{prompts['file']} has no more that can be used"
    )


def _about_row(row: dict[str, Any], dtype: str) -> list[str]:
    lines = []
    found = row.get("divergences", {"count": 0})
    if row.get("engine") and row["temperature"] == 0:
        lines.append(_agreement(row, dtype))
    elif row["lossless"] and found["count"] and found["unexplained"] is not None:
        lines.append(
            f"{row['drafter']}{_in_batch(row)}: {found['count']} of {row['prompts']} greedy outputs leave plain "
            f"decoding's path, {found['count'] - found['unexplained']} of them where rounding in {dtype} "
            f"explains it (largest top-2 margin there: {number(found['largest_margin'], 3)} logits)"
        )
        if (most := divergence.tail(found, row["prompts"])) is not None:
            lines[-1] += (
                f"; the other {found['unexplained']} are beyond what is taken for rounding, by {most:.2f} times at most"
                ", as a few of so many may be: target.dtype=float32 shows whether they are, for there all must be equal"
            )
    if (chosen := row.get("expected")) is not None:
        lines.append(
            f"{row['drafter']}, {setting_of(row)}: chose its drafts by itself, in the end {chosen['choice']}; "
            f"expected tau {chosen['tau']:.2f} and {chosen['speedup']:.2f}x, measured {number(row['tau'], 2)} and "
            f"{number(row['speedup'], 2, 'x')}"
        )
        if (over := row.get("over_best_fixed")) is not None and over["speedup"] is not None:
            between = " ({:.2f} to {:.2f})".format(*over["speedup_ci"]) if over["speedup_ci"] else ""
            best = f"{between} times the best of its method's fixed settings, {over['drafter']}"
            lines[-1] += f"; {over['speedup']:.2f}{best}"
    if (coverage := row.get("draft_vocab_coverage")) is not None:
        lines.append(
            f"{row['drafter']}, {setting_of(row)}: drafts with {row['draft_vocab']:,} tokens, the text's own "
            f"among them, which are {coverage:.1%} of those of its outputs"
        )
    if row["perplexity"] is None:
        which = f"{row['drafter']}, {setting_of(row)}"
        lines.append(f"{which}: no perplexity of its outputs ({row['perplexity_unavailable']})")
    return lines


def _agreement(row: dict[str, Any], dtype: str) -> str:
    """How far another engine's greedy outputs are plain decoding's; where they are not, nothing need be wrong."""
    found = row["divergences"]
    line = (
        f"{shown_name(row)}: {row['prompts'] - found['count']} of {row['prompts']} greedy outputs are plain decoding's"
    )
    if not found["count"] or found["each"] is None:
        return line
    places = sorted(each["position"] for each in found["each"])
    return (
        f"{line}; the others leave it after {places[len(places) // 2]} tokens (median; the first after {places[0]}), "
        f"{found['count'] - found['unexplained']} of them where rounding in {dtype} explains it"
    )


def tolerance_note(target: TargetModel) -> dict[str, Any]:
    """What divergence is accepted, for the report."""
    return {
        "relative_to_largest_logit": divergence.TOLERANCE[target.dtype],
        "rule": "accepted where the logits of both tokens lie less than this share of the largest absolute logit below "
        "the best one",
    }
