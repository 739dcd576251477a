"""The picture of a load test: times by kind of call, how soon cancelled sessions are free, memory over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from bench.load.memory import Sample
from bench.load.report import CANCEL_SECONDS, milliseconds
from bench.load.sessions import WAYS, Call

WIDTH, LEFT, RIGHT = 900, 210, 30
#: colours that people with colour-blindness tell apart (Okabe and Ito)
BLUE, ORANGE, GREEN, GREY, INK = "#0072b2", "#d55e00", "#009e73", "#c8ccd0", "#24292f"


class Canvas:
    """What an SVG is made of; white lies under it, so that it reads in light and dark alike."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = GREY, width: float = 1, dash: str = ""
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}" stroke-width="{width}"{dashed}/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: int = 12,
        bold: bool = False,
        colour: str = INK,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}>'
            f"{escape(text)}</text>"
        )

    def path(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.8) -> None:
        if points:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self.parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def svg(self, title: str, width: float, height: float) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )


class _LogScale:
    """Seconds to a place, a factor of ten being as long everywhere."""

    def __init__(self, least: float, most: float) -> None:
        self._low = math.floor(math.log10(max(least, 1e-4)))
        self._high = max(math.ceil(math.log10(max(most, 1e-3))), self._low + 1)

    def __call__(self, seconds: float) -> float:
        share = (math.log10(max(seconds, 10.0**self._low)) - self._low) / (self._high - self._low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        return [10.0**n for n in range(self._low, self._high + 1)]


def _named(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def _times(canvas: Canvas, rows: Sequence[dict[str, Any]], top: float) -> float:
    """p50, p95 and p99 of each kind; the place below."""
    canvas.text(LEFT, top, "Time of a call, by kind", bold=True, size=14)
    legend = LEFT + 190.0
    for name, colour in (("p50", BLUE), ("p95", GREEN), ("p99", ORANGE)):
        canvas.dot(legend, top - 4, 4.5, colour)
        canvas.text(legend + 8, top, name)
        legend += 56
    canvas.text(legend + 6, top, "the line goes to the longest")
    known = [row for row in rows if row["calls"]]
    if not known:
        return top
    scale = _LogScale(min(row["p50"] for row in known), max(row["max"] for row in known))
    bottom = top + 18 + 26 * len(known)
    for tick in scale.ticks():
        canvas.line(scale(tick), top + 12, scale(tick), bottom)
        canvas.text(scale(tick), bottom + 16, _named(tick), "middle", 11)
    for n, row in enumerate(known):
        y = top + 30 + 26 * n
        canvas.text(LEFT - 12, y + 4, row["kind"], "end")
        canvas.line(scale(row["p50"]), y, scale(row["max"]), y, "#8c959f", 2)
        for name, colour in (("p99", ORANGE), ("p95", GREEN), ("p50", BLUE)):
            canvas.dot(scale(row[name]), y, 5.5, colour)
    return bottom + 52


def _cancelling(canvas: Canvas, calls: Iterable[Call], top: float) -> float:
    """The share of cancelled calls whose session was free after so long."""
    canvas.text(LEFT, top, "Cancelled: share of sessions that are free after …", bold=True, size=14)
    height, right = 120.0, WIDTH - RIGHT
    times = {way: sorted(c.seconds for c in calls if c.kind == f"cancel: {way}" and c.error is None) for way in WAYS}
    longest = max([CANCEL_SECONDS * 1.15, *(t[-1] for t in times.values() if t)])
    step = 0.05 * math.ceil(longest / 0.05 / 6)
    most = step * math.ceil(longest / step)
    bottom = top + 20 + height

    def x(seconds: float) -> float:
        return LEFT + max(0.0, seconds) / most * (right - LEFT)

    for share in (0, 0.5, 1):
        y = bottom - share * height
        canvas.line(LEFT, y, right, y)
        canvas.text(LEFT - 8, y + 4, f"{share:.0%}", "end", 11)
    for n in range(round(most / step) + 1):
        canvas.text(x(step * n), bottom + 16, f"{milliseconds(step * n)} ms", "middle", 11)
    canvas.line(x(CANCEL_SECONDS), top + 12, x(CANCEL_SECONDS), bottom, ORANGE, 1.5, "5 4")
    canvas.text(x(CANCEL_SECONDS) - 6, bottom - 8, f"{milliseconds(CANCEL_SECONDS)} ms", "end", 11, colour=ORANGE)
    for n, (way, colour) in enumerate(zip(WAYS, (BLUE, GREEN, INK), strict=True)):
        found = times[way]
        canvas.path([(x(t), bottom - (i + 1) / len(found) * height) for i, t in enumerate(found)], colour)
        canvas.line(30, top + 28 + 20 * n, 46, top + 28 + 20 * n, colour, 2.5)
        canvas.text(52, top + 32 + 20 * n, way, size=11)
    return bottom + 52


def _memory(canvas: Canvas, samples: dict[str, list[Sample]], began: float, measured_from: float, top: float) -> float:
    """Megabytes of their own over time: the model server, all backends together, the largest backend."""
    canvas.text(LEFT, top, "Memory of their own (RssAnon) over time", bold=True, size=14)
    height, right = 150.0, WIDTH - RIGHT
    bottom = top + 20 + height
    together: dict[int, list[float]] = {}
    for name, mine in samples.items():
        if name.startswith("backend"):
            for s in mine:
                together.setdefault(round((s.at - began) / 5), []).append(s.own)
    lines = {
        "model server": [(s.at - began, s.own) for s in samples.get("model server", [])],
        "all backends": [(5.0 * at, sum(own)) for at, own in sorted(together.items())],
        "the largest backend": [(5.0 * at, max(own)) for at, own in sorted(together.items())],
    }
    everything = [point for points in lines.values() for point in points]
    if not everything:
        return top
    longest = max(at for at, _ in everything)
    most = 200 * math.ceil(max(own for _, own in everything) / 200)

    def place(at: float, own: float) -> tuple[float, float]:
        return LEFT + at / longest * (right - LEFT), bottom - own / most * height

    for n in range(3):
        _, y = place(0, most * n / 2)
        canvas.line(LEFT, y, right, y)
        canvas.text(LEFT - 8, y + 4, f"{most * n / 2:.0f} MB", "end", 11)
    step = max(1, round(longest / 60 / 6)) * 60 if longest > 150 else 30
    for at in range(0, int(longest) + 1, step):
        canvas.text(place(at, 0)[0], bottom + 16, f"{at // 60} min" if step >= 60 else f"{at} s", "middle", 11)
    x, _ = place(measured_from - began, 0)
    canvas.line(x, top + 12, x, bottom, "#8c959f", 1.2, "3 3")
    canvas.text(x + 5, top + 24, "measured from here", size=11, colour="#57606a")
    for n, ((name, points), colour) in enumerate(zip(lines.items(), (ORANGE, BLUE, GREEN), strict=True)):
        canvas.path([place(at, own) for at, own in points], colour)
        canvas.line(30, top + 28 + 20 * n, 46, top + 28 + 20 * n, colour, 2.5)
        canvas.text(52, top + 32 + 20 * n, name, size=11)
    return bottom + 36


def draw(
    figures: dict[str, Any], calls: Sequence[Call], samples: dict[str, list[Sample]], began: float, measured_from: float
) -> str:
    """The SVG. ``began``, ``measured_from``: ``time.monotonic`` of the start, and of the end of the warm-up."""
    canvas = Canvas()
    sessions = sum(figures["sessions"].values())
    title = f"{sessions} sessions, {figures['seconds'] / 60:g} minutes, {figures['machine']['cores']} cores"
    canvas.text(30, 34, title, bold=True, size=16)
    top = _times(canvas, [row for row in figures["latencies"] if ":" not in row["kind"]], 72)
    top = _cancelling(canvas, calls, top)
    height = _memory(canvas, samples, began, measured_from, top)
    return canvas.svg(title, WIDTH, height)
