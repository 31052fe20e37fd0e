"""Closed-loop load on served endpoints: a fixed number of requests in flight. For eval.load.

Endpoints take turns part by part of the prompts. In a turn, ``in_flight`` threads each send one request after another:
first requests for warm-up, one per thread; then the part's prompts, each once; then further requests, which keep the
server busy until the last prompt is answered. Only the prompts count.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

from drafters.common.provenance import changes, code_state, cpu_name, load_average
from drafters.common.wording import json_object
from eval.configs import LoadConfig
from eval.measure.counters import read_counters
from eval.measure.stream import Answer, Endpoint
from eval.prompts.prompt_files import Record, files_sha256
from eval.prompts.prompts import load_questions
from eval.prompts.suites import WARM_UP

Messages = list[dict[str, Any]]
FILE = "load.json"


def measure(config: LoadConfig, argv: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the measurement after each turn: what ``eval.figures.load`` reads, with other endpoints' earlier turns.

    Raises:
        ValueError: an endpoint cannot be reached, or ``out`` has measurements with other settings.
    """
    questions, spare, skipped = load_questions(config.prompts)
    endpoints = [Endpoint(label, url, config) for label, url in config.endpoints.items()]
    others = [plain(record) for record in spare] or [[{"role": "user", "content": text}] for text in WARM_UP]
    data = begin(config, questions, dict(skipped))
    data["endpoints"] |= {one.label: {"url": one.base, "model": one.model, "argv": argv} for one in endpoints}
    parts = [list(range(len(questions)))[at :: config.parts] for at in range(min(config.parts, len(questions)))]
    for (number, part), (level, in_flight) in itertools.product(enumerate(parts), enumerate(config.requests)):
        for endpoint in endpoints if (number + level) % 2 == 0 else endpoints[::-1]:
            answers, gains = take_turn(endpoint, [plain(questions[at]) for at in part], others, in_flight)
            rows = [{"prompt": at, **answer.stored()} for at, answer in zip(part, answers, strict=True)]
            data["turns"].append({"endpoint": endpoint.label, "in_flight": in_flight, "answers": rows, "gains": gains})
            data["environment"]["load_average"].append(load_average())
            yield data


def plain(record: Record) -> Messages:
    """Return a question's messages as a server takes them."""
    return [{"role": message["role"], "content": message["content"]} for message in record.messages]


def begin(config: LoadConfig, questions: list[Record], skipped: dict[str, int]) -> dict[str, Any]:
    """Return the measurement at its start: other endpoints' turns that ``out`` has, or none."""
    keys = {"max_new_tokens", "temperature", "extra"}
    settings = config.model_dump(mode="json", include=keys) | {
        "prompts": config.prompts.shown_files,
        "sha256": files_sha256(config.prompts.read_files),
        "ids": [record.id for record in questions],
    }
    earlier = read_earlier(config.out)
    if earlier is not None and (different := changes(earlier["settings"], settings)):
        raise ValueError(
            f"{config.out / FILE} has another measurement: {different[0]}; give another --out, or delete it"
        )
    commit, dirty = code_state()
    data = earlier or {"endpoints": {}, "turns": [], "baseline": None}
    return {
        "settings": settings,
        "baseline": config.baseline or data["baseline"],
        "endpoints": {label: one for label, one in data["endpoints"].items() if label not in config.endpoints},
        "turns": [turn for turn in data["turns"] if turn["endpoint"] not in config.endpoints],
        "environment": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "client": cpu_name(),
            "commit": commit,
            "dirty": dirty,
            "load_average": [load_average()],
            "config": config.model_dump(mode="json"),
            "skipped": skipped,
        },
    }


def read_earlier(out: Path) -> dict[str, Any] | None:
    """Return the measurement in a folder, if there is one."""
    file = out / FILE
    return json_object(file, str(file)) if file.is_file() else None


def take_turn(
    endpoint: Endpoint, prompts: Sequence[Messages], others: Sequence[Messages], in_flight: int
) -> tuple[list[Answer], dict[str, float] | None]:
    """Keep ``in_flight`` requests at the server until all ``prompts`` are answered or have failed.

    Returns:
        The answers in the order of the prompts, and what the server's counters gained; None without counters.
    """
    answers: list[Answer | None] = [None] * len(prompts)
    places, lock, done = itertools.count(-in_flight), threading.Lock(), threading.Event()

    def work() -> None:
        while not done.is_set():
            with lock:
                place = next(places)
            if 0 <= place < len(prompts):
                answers[place] = endpoint.ask(prompts[place], done)
                if None not in answers:
                    done.set()
            elif endpoint.ask(others[place % len(others)], done).outcome != "answered":
                done.wait(0.1)  # seconds: a server that refuses at once is not asked without a pause

    before = counters(endpoint)
    with ThreadPoolExecutor(in_flight) as pool:
        try:
            threads = [pool.submit(work) for _ in range(in_flight)]
            done.wait()
            after = counters(endpoint)
        finally:
            done.set()
    for thread in threads:
        thread.result()
    gains = None
    if before is not None and after is not None:
        gains = {name: value - before.get(name, 0.0) for name, value in after.items()}
        if min(gains.values()) < 0:  # the server was started again
            gains = None
    return [answer for answer in answers if answer is not None], gains


def counters(endpoint: Endpoint) -> dict[str, float] | None:
    """Return the server's counters; None if it has no /metrics with an engine's."""
    try:
        return read_counters(endpoint.page("/metrics")) or None
    except (OSError, HTTPException):
        return None
