"""The tables and pictures of docs/scale.md, from the figures in bench/out/."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.load.picture import BLUE, GREEN, GREY, ORANGE, Canvas
from bench.scale.setting import DIMENSIONS, N, Row

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out"
DOCUMENT, PICTURES = ROOT / "docs" / "scale.md", ROOT / "docs" / "pictures"
WIDTH, HEIGHT, PANEL = 900, 330, 450

#: name, points, colour, whether it is a floor
Line = tuple[str, list[tuple[float, float]], str, bool]


def number(x: float) -> str:
    if x >= 1000:
        return f"{x:,.0f}".replace(",", " ")
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2f}"


def count(x: float) -> str:
    return f"{x:,.0f}".replace(",", " ")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---:" for _ in head], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def panel(canvas: Canvas, left: float, title: str, of_x: str, unit: str, lines: list[Line]) -> None:
    """One chart, both axes logarithmic; a floor is dashed."""
    lines = [line for line in lines if line[1]]
    x0, x1, top, bottom = left + 62, left + PANEL - 24, 46 + 18.0 * ((len(lines) + 1) // 2), HEIGHT - 44
    xs = [math.log10(x) for _, points, _, _ in lines for x, _ in points]
    low, high = _decades([y for _, points, _, _ in lines for _, y in points])
    width = max(max(xs) - min(xs), 0.1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - min(xs)) / width
        return x0 + across * (x1 - x0), bottom - (math.log10(y) - low) / (high - low) * (bottom - top)

    canvas.text(left + 20, 28, title, bold=True, size=14)
    for n, (name, _, colour, is_floor) in enumerate(lines):
        x, y = left + 22 + (n % 2) * 205, 48 + 18 * (n // 2)
        canvas.line(x, y - 4, x + 20, y - 4, colour, 2, "4 3" if is_floor else "")
        canvas.text(x + 26, y, name, size=11)
    for power in range(low, high + 1):
        _, y = place(10 ** min(xs), 10.0**power)
        canvas.line(x0, y, x1, y, GREY)
        canvas.text(x0 - 6, y + 4, f"{10.0**power:g} {unit}", "end", 10)
    for x in sorted({x for _, points, _, _ in lines for x, _ in points}):
        across, _ = place(x, 10.0**low)
        canvas.text(across, bottom + 16, count(x), "middle", 10)
    canvas.text((x0 + x1) / 2, bottom + 34, of_x, "middle", 11)
    for _, points, colour, is_floor in lines:
        placed = [place(x, y) for x, y in points]
        for (xa, ya), (xb, yb) in itertools.pairwise(placed):
            canvas.line(xa, ya, xb, yb, colour, 2, "5 4" if is_floor else "")
        for x, y in placed:
            canvas.dot(x, y, 3.5, colour)


def points(rows: Iterable[Row], x: str, y: str) -> list[tuple[float, float]]:
    return [(row[x], max(row[y], 1e-3)) for row in rows if row.get(y) is not None]


def _rows(found: list[Row]) -> tuple[str, str]:
    kinds = {"none": ("HNSW", BLUE), "halfvec": ("HNSW, halfvec", GREEN), "binary": ("HNSW, binary", ORANGE)}
    of = {kind: [row for row in found if row["kind"] == kind] for kind in kinds}
    canvas = Canvas()
    lines: list[Line] = []
    for kind, (name, colour) in kinds.items():
        lines.append((name, points(of[kind], "rows", "ours ms"), colour, False))
        lines.append((f"{name}, bare", points(of[kind], "rows", "bare ms"), colour, True))
    panel(canvas, 0, "A search, the vector given", "segments", "ms", lines)
    panel(
        canvas, PANEL, "Building the index", "segments", "s",
        [(name, points(of[kind], "rows", "build s"), colour, False) for kind, (name, colour) in kinds.items()],
    )  # fmt: skip
    head = ["segments", "index", "built in s", "index MB", "vector given: bare, ours ms", "ratio",
            "with embedding: bare, ours ms", "ratio", f"recall@{N}: bare, ours"]  # fmt: skip
    body = [
        [
            count(row["rows"]),
            kinds[row["kind"]][0],
            number(row["build s"]) + (f" (bare {number(row['bare build s'])})" if "bare build s" in row else ""),
            number(row["index MB"]),
            f"{number(row['bare ms'])}, {number(row['ours ms'])}",
            f"{row['ours ms'] / row['bare ms']:.1f}",
            f"{number(row['bare with embedding ms'])}, {number(row['ours with embedding ms'])}",
            f"**{row['ours with embedding ms'] / row['bare with embedding ms']:.2f}**",
            f"{row['bare recall']:.2f}, {row['recall']:.2f}",
        ]
        for row in found
    ]
    most = found[-1]
    below = (
        f"The table of {count(most['rows'])} segments has {number(most['table MB'])} MB. A session that searches has"
        f" {number(most['backend MB'])} MB of its own, one that sends bare statements"
        f" {number(most['bare backend MB'])} MB."
    )
    return f"{table(head, body)}\n\n{below}", canvas.svg("Cost by segments", WIDTH, HEIGHT)


def _stores(found: list[Row]) -> tuple[str, str]:
    canvas = Canvas()
    panel(
        canvas, 0, "Search of all, HNSW in each", "stores", "ms",
        [
            ("ml_rag", points(found, "stores", "ours ms"), BLUE, False),
            ("bare UNION ALL", points(found, "stores", "bare ms"), BLUE, True),
            ("ml_rag, one table", points(found, "stores", "ours one ms"), GREEN, False),
            ("bare, one table", points(found, "stores", "bare one ms"), GREEN, True),
        ],
    )  # fmt: skip
    panel(
        canvas, PANEL, "Exact search, and discovery alone", "stores", "ms",
        [
            ("exact, all stores", points(found, "stores", "ours, exact ms"), BLUE, False),
            ("exact, one table", points(found, "stores", "ours one, exact ms"), GREEN, False),
            ("discovery", points(found, "stores", "discovery ms"), ORANGE, False),
        ],
    )  # fmt: skip
    head = ["stores", "one table ms", "all stores ms", "ratio", "bare UNION ALL ms", "ours / bare",
            "exact: one, all ms", "ratio", "discovery ms", "first call s", "locks", "session MB"]  # fmt: skip
    body = [
        [
            count(row["stores"]),
            number(row["ours one ms"]),
            number(row["ours ms"]),
            f"**{row['ours ms'] / row['ours one ms']:.1f}**",
            number(row["bare ms"]),
            f"{row['ours ms'] / row['bare ms']:.1f}",
            f"{number(row['ours one, exact ms'])}, {number(row['ours, exact ms'])}",
            f"**{row['ours, exact ms'] / row['ours one, exact ms']:.1f}**",
            number(row["discovery ms"]),
            number(row["first s"]),
            count(row["locks"]),
            number(row["backend MB"]),
        ]
        for row in found
    ]
    above = f"The same {count(found[0]['rows'])} segments in all of them; the vector is given."
    return f"{above}\n\n{table(head, body)}", canvas.svg("Cost by stores", WIDTH, HEIGHT)


def _sessions(found: list[Row]) -> tuple[str, str]:
    canvas = Canvas()
    kinds = {"ours": ("ml_rag, vector given", BLUE, False), "bare": ("bare, vector given", BLUE, True),
             "ours with embedding": ("ml_rag, with embedding", ORANGE, False),
             "bare with embedding": ("bare, with embedding", ORANGE, True)}  # fmt: skip
    for left, title, unit, figure in (
        (0, "Time of a search, median", "ms", "p50 ms"),
        (PANEL, "Searches a second", "", "a second"),
    ):
        panel(
            canvas, left, title, "sessions", unit,
            [(name, points(found, "sessions", f"{kind} {figure}"), colour, floor)
             for kind, (name, colour, floor) in kinds.items()],
        )  # fmt: skip
    head = ["sessions", "", "bare: p50, p95 ms", "ours: p50, p95 ms", "ratio of p50", "bare a second", "ours a second"]
    body = [
        [
            count(row["sessions"]),
            what,
            f"{number(row[f'bare{kind} p50 ms'])}, {number(row[f'bare{kind} p95 ms'])}",
            f"{number(row[f'ours{kind} p50 ms'])}, {number(row[f'ours{kind} p95 ms'])}",
            f"{row[f'ours{kind} p50 ms'] / row[f'bare{kind} p50 ms']:.1f}",
            number(row[f"bare{kind} a second"]),
            number(row[f"ours{kind} a second"]),
        ]
        for row in found
        for kind, what in (("", "vector given"), (" with embedding", "with embedding"))
    ]
    above = f"One table of {count(found[0]['rows'])} segments with HNSW; each session asks as fast as it can."
    return f"{above}\n\n{table(head, body)}", canvas.svg("Cost by sessions", WIDTH, HEIGHT)


def _tenants(found: list[Row]) -> tuple[str, str]:
    layouts = {"column": ("a column", BLUE), "partitions": ("partitions", GREEN), "stores": ("a store each", ORANGE)}
    of = {layout: [row for row in found if row["layout"] == layout] for layout in layouts}
    canvas = Canvas()
    lines: list[Line] = []
    for layout, (name, colour) in layouts.items():
        lines.append((name, points(of[layout], "tenants", "ours ms"), colour, False))
        lines.append((f"{name}, bare", points(of[layout], "tenants", "bare ms"), colour, True))
    panel(canvas, 0, "A search of one tenant", "tenants", "ms", lines)
    panel(
        canvas, PANEL, "Catalogue", "tenants", "kB",
        [(name, points(of[layout], "tenants", "catalogue kB"), colour, False)
         for layout, (name, colour) in layouts.items()],
    )  # fmt: skip
    head = ["tenants", "", "search: bare, ours ms", "ratio", "INSERT ms", "made in s", "indexed in s", "data MB",
            "catalogue MB", "session MB"]  # fmt: skip
    body = [
        [
            count(row["tenants"]),
            layouts[row["layout"]][0],
            f"{number(row['bare ms'])}, {number(row['ours ms'])}",
            f"{row['ours ms'] / row['bare ms']:.1f}",
            number(row["write ms"]),
            number(row["make s"]),
            number(row["index s"]),
            number(row["size MB"]),
            number(row["catalogue kB"] / 1000),
            number(row["backend MB"]),
        ]
        for row in found
    ]
    above = f"{count(found[0]['rows'])} segments in all (at least one a tenant); a search of one tenant's."
    return f"{above}\n\n{table(head, body)}", canvas.svg("Cost by tenants", WIDTH, HEIGHT)


SHOWN = (40, 100, 200, 400, 1000)


def _tuning(found: list[Row]) -> tuple[str, str]:
    kinds = {"none": "HNSW", "halfvec": "HNSW, halfvec", "binary": "HNSW, binary"}
    body = []
    for row in found:
        (_, _, _, exact, _), *curve = row["curve"]
        (kept,) = [(ef, rescore) for ef, rescore, _, _, is_kept in curve if is_kept]
        points = {ef: (recall, ms) for ef, rescore, recall, ms, _ in curve if rescore in (None, ef)}
        body.append(
            [
                *(count(row["rows"]), row["vectors"], kinds[row["kind"]]),
                *(f"{points[ef][0]:.3f}, {exact / points[ef][1]:.0f}" for ef in SHOWN),
                f"**{kept[0]}**" if kept[1] in (None, kept[0]) else f"**{kept[0]}**, rescore {count(kept[1])}",
                number(exact),
            ]
        )
    head = ["segments", "vectors", "index", *(f"ef_search {ef}" for ef in SHOWN), "kept", "exact ms"]
    return table(head, body), ""


SECTIONS: dict[str, Callable[[list[Row]], tuple[str, str]]] = {
    "rows": _rows,
    "stores": _stores,
    "sessions": _sessions,
    "tenants": _tenants,
    "tuning": _tuning,
}


def _measured(name: str, document: dict[str, Any]) -> str:
    machine = document["machine"]
    load = document.get("load", 0.0)
    busy = f" Other programs kept them busy: load {load:.0f} when it began." if load >= 1 else ""
    return (
        f"`python -m bench.scale {name}{' --quick' if document['quick'] else ''}`, {document['at'][:10]}:"
        f" {machine['cores']} cores ({machine['cpu']}), which the clients and the model server share;"
        f" {DIMENSIONS} dimensions, medians of calls taken in turn.{busy}"
    )


def write() -> Iterator[Path]:
    """Write what has been measured between the marks of docs/scale.md, and its pictures."""
    text = DOCUMENT.read_text()
    for name, section in SECTIONS.items():
        path = OUT / f"scale_{name}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        shown, picture = section(document["figures"])
        mark = f"<!-- written by bench/scale: {name} -->"
        before, found, rest = text.partition(mark)
        _, _, after = rest.partition("<!-- end -->")
        assert found, f"{DOCUMENT} has no {mark}"
        if picture:
            drawn = PICTURES / f"scale-{name}.svg"
            drawn.write_text(picture)
            shown = f"![Cost by {name}](pictures/{drawn.name})\n\n{shown}"
            yield drawn
        text = f"{before}{mark}\n{_measured(name, document)}\n\n{shown}\n<!-- end -->{after}"
    DOCUMENT.write_text(text)
    yield DOCUMENT
