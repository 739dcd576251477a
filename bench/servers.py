"""``python -m bench.servers``: texts embedded a second by 1, 2 and 4 model servers behind HAProxy, each of one core.

Each server has the real model with one thread, so that a machine of few cores can show what a machine for each would:
more servers than cores gain nothing. The floor is one server asked directly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import httpx
from rich.console import Console

from bench import corpus
from bench.common import print_table
from bench.measure import Figure
from support.servers import running_server

ROOT = Path(__file__).parents[1]
MODEL = "all_minilm_l6_v2"
CONFIG = f'[models.{MODEL}]\ntask = "embed"\nengine = "sentence-transformers"\nthreads = 1\n'
#: texts of one request, as a vectorizer sends them, and requests at once for each server
TEXTS, AT_ONCE = 64, 2


@contextmanager
def balanced(folder: Path, paths: list[Path]) -> Iterator[Path]:
    """The socket of HAProxy in front of the servers, as docs/scale.md sets it up."""
    block = re.search(r"```\n(global\n.*?)```", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL)
    assert block
    lines = [line for line in block[1].splitlines() if not re.match(r"  (bind|server) ", line)]
    address = folder / "all.sock"
    lines += [f"  bind unix@{address}", *(f"  server s{n} unix@{path}" for n, path in enumerate(paths))]
    configuration = folder / "haproxy.cfg"
    configuration.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["haproxy", "-db", "-f", str(configuration)], stderr=subprocess.DEVNULL)
    try:
        while not address.exists():
            assert process.poll() is None, "haproxy has ended"
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()


def throughput(address: Path, texts: list[str], threads: int, seconds: float) -> float:
    """Texts a second, by so many clients that ask again and again."""
    done = [0] * threads
    end = time.monotonic() + seconds

    def ask(n: int) -> None:
        transport = httpx.HTTPTransport(uds=str(address))
        with httpx.Client(transport=transport, base_url="http://server", timeout=60) as client:
            while time.monotonic() < end:
                body = {"model": MODEL, "input": texts, "encoding_format": "base64"}
                client.post("/v1/embeddings", json=body).raise_for_status()
                done[n] += len(texts)

    began = time.monotonic()
    workers = [threading.Thread(target=ask, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.monotonic() - began)


@click.command(help=__doc__)
@click.option("--models-dir", type=click.Path(path_type=Path, exists=True), envvar="ML_RAG_MODELS", required=True)
@click.option("--seconds", type=click.FloatRange(1), default=15, show_default=True, help="Time of each of three turns.")
def main(models_dir: Path, seconds: float) -> None:
    texts = list(corpus.segments(TEXTS))
    numbers = [1, 2, 4]
    rates: dict[str, list[float]] = {name: [] for name in ("alone", *map(str, numbers))}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ml_rag_")))
        paths = [folder / f"{n}.sock" for n in range(max(numbers))]
        for path in paths:
            stack.enter_context(running_server(socket=path, config=CONFIG, models_dir=models_dir))
            throughput(path, texts[:1], 1, 0.1)  # loads the model
        fronts = {"alone": (paths[0], 1)}
        for n in numbers:
            (folder / f"front{n}").mkdir()
            fronts[str(n)] = (stack.enter_context(balanced(folder / f"front{n}", paths[:n])), n)
        for _ in range(3):
            for name, (address, servers) in fronts.items():
                rates[name].append(throughput(address, texts, AT_ONCE * servers, seconds))
    floor = sorted(rates.pop("alone"))[1]
    figures = [
        Figure(
            f"{name} servers behind HAProxy", "texts/s", sorted(found)[1], "one server, one thread, asked directly",
            floor, "shown", True,
        )
        for name, found in rates.items()
    ]  # fmt: skip
    print_table(figures, Console(width=160))


if __name__ == "__main__":
    main()
