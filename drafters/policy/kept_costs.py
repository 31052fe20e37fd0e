"""What steps cost, as numbers and as kept on disk: of each moment at which a machine was found to be another.

A shared machine is not the same from minute to minute. On one of a cloud a step without a draft took now 7.0 ms and one
of 16 rows 15.8, now 8.7 and 13.9: memory and arithmetic change places, and what suits the one moment drafts too much or
too little in the other. Which is next nobody knows. So a process that finds the machine other than every kept
measurement measures once more, and what counts is the mean.
"""

import hashlib
import json
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from drafters.common.files import replace_json
from drafters.common.paths import user_cache

CACHE, AGAIN = "DRAFTERS_CACHE", "DRAFTERS_MEASURE_AGAIN"  # environment: the folder; "1" measures what is kept anew
BUSY = 0.6  # of the seconds that are kept: where a step takes less now, the machine was busy then, and they are dropped
APART = 1.06  # times the seconds of a step, from where on the machine is another...
SLOWER = 1.5  # ...and from where on it is busy
MOMENTS = 4  # measurements that are kept

CURVES, NUMBERS = ("verify", "chain", "draft"), ("plain", "first", "accepted", "late")  # of Costs

_known: dict[str, "Costs"] = {}  # what this process has measured or read, by key


@dataclass(frozen=True)
class Curve:
    """Seconds by rows: on the line between two measured counts, beyond the last on the line through the last two.

    Args:
        rows: ascending. seconds: of a forward of so many rows; never falling.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: float) -> float:
        """Seconds of a forward of ``rows`` rows."""
        if len(self.rows) == 1:
            return self.seconds[0]
        place = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(y0 + (rows - x0) * (y1 - y0) / (x1 - x0), self.seconds[0])

    def points(self) -> dict[int, float]:
        """The measured seconds by rows."""
        return dict(zip(self.rows, self.seconds, strict=True))

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "Curve":
        """The curve through measured points; noise that lets more rows take less time is levelled."""
        rows = sorted(measured)
        return cls(tuple(rows), tuple(accumulate((measured[count] for count in rows), max)))


class Costs(NamedTuple):
    """Seconds of a step's parts; rows are those of each batch row.

    Attributes:
        plain: a step without a draft. verify, chain: what follows drafting a tree, a chain, by the target's rows.
        first: a draft of one token. draft: one more pass of the drafter by its rows.
        accepted: what each accepted token adds: where tokens are sampled, its distribution is made, and it is tried.
        late: what each token adds to the next draft that was committed without one.
    """

    plain: float
    verify: Curve
    chain: Curve
    first: float
    draft: Curve
    accepted: float = 0.0
    late: float = 0.0

    def towards(self, far: "Costs", share: float) -> "Costs":
        """So far on the line to those behind a longer context, which take no less; beyond them with a share above 1."""

        def on(near: float, other: float) -> float:
            return near + share * max(other - near, 0.0)

        def along(near: Curve, other: Curve) -> Curve:
            return Curve.of({rows: on(seconds, other.at(rows)) for rows, seconds in near.points().items()})

        curves = (along(getattr(self, name), getattr(far, name)) for name in CURVES)
        numbers = (on(getattr(self, name), getattr(far, name)) for name in NUMBERS)
        return _costs(numbers, dict(zip(CURVES, curves, strict=True)))


def _costs(numbers: Iterable[float], curves: Mapping[str, Curve]) -> Costs:
    plain, first, accepted, late = numbers
    return Costs(plain, first=first, accepted=accepted, late=late, **curves)


def mean(moments: Sequence[Costs]) -> Costs:
    """Of measurements of the same rows."""
    curves: dict[str, Curve] = {}
    for name in CURVES:
        points = [getattr(costs, name).points() for costs in moments]
        curves[name] = Curve.of({rows: fmean(each[rows] for each in points) for rows in points[0]})
    return _costs((fmean(getattr(costs, name) for costs in moments) for name in NUMBERS), curves)


def kept(key: Mapping[str, Any], measure: Callable[[], Costs], plain: Callable[[], float]) -> Costs:
    """The mean of the measurements that are kept under ``key``, with one more where the machine is another by now.

    A file that cannot be read counts as none, and one that cannot be written is not missed: it is only time.

    Args:
        plain: measures what a step without a draft takes, alone; in seconds.
    """
    text = json.dumps(key, sort_keys=True)
    if text in _known:
        return _known[text]
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    moments = [] if os.environ.get(AGAIN) == "1" else _read(path, key)
    now = plain() if moments else 0.0
    moments = [costs for costs in moments if now >= BUSY * costs.plain]
    if not moments or (len(moments) < MOMENTS and _is_another([costs.plain for costs in moments], now)):
        moments.append(measure())
        _write(path, key, moments)
    _known[text] = mean(moments)
    return _known[text]


def _is_another(before: Sequence[float], now: float) -> bool:
    """Whether the machine is none of those on which a step took so long ``before``, and is not merely busy."""
    return now < SLOWER * min(before) and all(max(now, each) > APART * min(now, each) for each in before)


def _write(path: Path, key: Mapping[str, Any], moments: Sequence[Costs]) -> None:
    def parts(costs: Costs) -> dict[str, Any]:
        curves = {name: getattr(costs, name).points() for name in CURVES}
        return {name: getattr(costs, name) for name in NUMBERS} | curves

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_json(path, {"key": dict(key), "moments": [parts(costs) for costs in moments]})
    except OSError as error:
        logging.getLogger(__name__).info("what a step costs is not kept: %s", error)


def _read(path: Path, key: Mapping[str, Any]) -> list[Costs]:
    def costs_of(found: Mapping[str, Any]) -> Costs:
        curves = {name: Curve.of({int(rows): float(value) for rows, value in found[name].items()}) for name in CURVES}
        costs = _costs((float(found[name]) for name in NUMBERS), curves)
        if not all(curve.rows for curve in curves.values()):
            raise ValueError("a curve without a point")
        if min(costs.plain, *costs.verify.seconds, *costs.chain.seconds) <= 0:
            raise ValueError("a step that takes no time")
        return costs

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        moments = [costs_of(each) for each in found["moments"]]
        rows = {tuple(getattr(costs, name).rows for name in CURVES) for costs in moments}
        return moments if found["key"] == key and len(rows) == 1 else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _folder() -> Path:
    """``DRAFTERS_CACHE``, else the user's cache."""
    given = os.environ.get(CACHE)
    return Path(given).expanduser() if given else user_cache()
