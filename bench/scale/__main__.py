"""``python -m bench.scale all --quick``: takes the curves of docs/scale.md and writes them there.

Needs a server with the extension and a model server with the real models, as ``make scale`` starts them; it measures in
a cluster of its own, of the same installation and with that model server. Each part keeps its figures in bench/out/;
``docs`` writes those that are there into docs/scale.md again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

from bench.common import machine
from bench.scale import page, rows, sessions, stores, tenants, tuning
from bench.scale.setting import Row, Setting, own_cluster

PARTS: dict[str, Callable[[Setting], list[Row]]] = {
    "rows": rows.measure,
    "stores": stores.measure,
    "sessions": sessions.measure,
    "tenants": tenants.measure,
    "tuning": tuning.measure,
}


@click.command(help=__doc__)
@click.argument("part", type=click.Choice([*PARTS, "all", "docs"]))
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"])
@click.option("--quick", is_flag=True, help="Fewer rows and calls: a quarter of an hour for all parts.")
@click.option("--max", "most", is_flag=True, help="Also 1,000,000 rows and 100,000 tenants.")
@click.option(
    "--folder", type=click.Path(path_type=Path, exists=True), default=Path("/var/tmp"), show_default=True,
    help="Where the cluster is made: 3 GB, with --max 10 GB.",
)  # fmt: skip
def main(part: str, dsn: str | None, quick: bool, most: bool, folder: Path) -> None:
    console = Console(width=220)
    if dsn is None and part != "docs":
        raise click.UsageError("--dsn is missing: make scale sets it")
    page.OUT.mkdir(parents=True, exist_ok=True)
    for name in PARTS if part == "all" else [part] if part in PARTS else []:
        began, load = time.monotonic(), os.getloadavg()[0]
        console.print(f"measuring: {name} …")
        with own_cluster(dsn or "", folder, quick, most) as setting:
            found = PARTS[name](setting)
        document = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "quick": quick,
            "load": load,
            "figures": found,
        }
        (page.OUT / f"scale_{name}.json").write_text(json.dumps(document, indent=1, default=float) + "\n")
        console.print(f"    done in {time.monotonic() - began:.0f} s")
    if part in ("all", "docs"):
        for path in page.write():
            console.print(f"written: {path}")


if __name__ == "__main__":
    main()
