"""``ml-rag eval``: how well the search does on folders of documents and questions."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ml_rag.client import datasets
from ml_rag.client.dsn import dsn_option
from ml_rag.client.evaluation import ARMS, Evaluation, connect
from ml_rag.terminal import printable
from ml_rag.work import Work

#: measures of answers, shown where there are answers
_ANSWERS = ("answer_exact", "answer_f1", "refused_rightly", "refused_wrongly", "support", "groundedness", "relevance")
#: stages whose times are shown; the JSON has all
_STAGES = ("retrieval", "generation", "judge")


def languages(values: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Folder name -> language, from ``en`` (all folders) and ``cmrc=zh`` (one)."""
    common = [value for value in values if "=" not in value]
    own = dict(value.split("=", 1) for value in values if "=" in value)
    if unknown := set(own) - set(names):
        raise click.UsageError(f"--language names no folder: {', '.join(sorted(unknown))}")
    return {name: own.get(name, common[-1] if common else "") for name in names}


def measure(
    evaluation: Evaluation, arms: Sequence[str], limit: int | None, options: dict[str, Any], work: Work
) -> dict[str, Any]:
    """Load a dataset, ask its questions of each arm; the document that ``--json`` has of it."""
    name = evaluation.dataset.name
    with work.task(f"{name}: documents") as task:
        loaded = evaluation.load(task.tell)
    # without an answer there is nothing to measure in a question that has no document
    questions = [q for q in evaluation.dataset.questions if q.documents or options.get("generate")]
    evaluation.ask(questions)
    found: dict[str, Any] = {}
    for arm in arms:
        if reason := evaluation.missing(ARMS[arm]):
            found[arm] = {"missing": reason}
            continue
        with work.task(f"{name}: {ARMS[arm].title}") as task:
            found[arm] = evaluation.run(ARMS[arm], {**options, "limit": limit}, task.tell)
    return {
        "name": name,
        "store": evaluation.store,
        "documents": asdict(loaded),
        "questions": min(len(questions), limit or len(questions)),
        "arms": found,
    }


def table(result: dict[str, Any], cutoffs: Sequence[int]) -> Table:
    """The arms of one dataset."""
    documents = result["documents"]
    title = f"{printable(result['name'])}: {documents['documents']} documents, {documents['segments']} segments"
    title += f", {result['questions']} questions"
    # no markup: the name may have brackets
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    runs = [run for run in result["arms"].values() if "missing" not in run]
    names = [f"recall@{k}" for k in cutoffs] + [f"ndcg@{k}" for k in cutoffs[-1:]] + ["mrr"]
    if any("answer_length" in run["measures"] for run in runs):
        names += [name for name in _ANSWERS if any(name in run["measures"] for run in runs)]
    stages = [stage for stage in _STAGES if any(stage in run["latency"] for run in runs)]
    table.add_column("")
    for name in [*names, *(f"{stage} p50, p95" for stage in stages), "errors", "run"]:
        table.add_column(name, justify="right")
    for arm, run in result["arms"].items():
        if "missing" in run:
            table.add_row(ARMS[arm].title, "not run")
            continue
        measures = [f"{run['measures'][name]:.3f}" if name in run["measures"] else "" for name in names]
        times = [run["latency"].get(stage) for stage in stages]
        table.add_row(
            ARMS[arm].title,
            *measures,
            *(f"{t['p50']:.1f}, {t['p95']:.1f} ms" if t else "" for t in times),
            str(sum(run["errors"].values()) or ""),
            str(run["run_id"] or ""),
        )
    return table


def write(path: Path, document: dict[str, Any]) -> None:
    """The JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with part.open("x", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")
    part.replace(path)


def _arms(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    arms = [arm.strip() for arm in value.split(",")]
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise click.BadParameter(f"{', '.join(unknown)}; there are: {', '.join(ARMS)}")
    return arms


def _cutoffs(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    try:
        return sorted({int(k) for k in value.split(",")})
    except ValueError:
        raise click.BadParameter("numbers with commas between them, such as 1,3,10") from None


@click.command("eval")
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@dsn_option
@click.option(
    "--schema", default="ml_rag_eval", show_default=True, help="Where the stores go; made where there is none."
)
@click.option("--language", "spoken", multiple=True, metavar="[FOLDER=]CODE", help="Language, such as en or cmrc=zh.")
@click.option("--arms", default="vector,text,hybrid,ranker", show_default=True, callback=_arms, help="With exact: also "
              "vectors without the index.")  # fmt: skip
@click.option("--k", "cutoffs", default="1,3,5,10", show_default=True, callback=_cutoffs, help="Cut-offs.")
@click.option("--limit", type=click.IntRange(min=1), help="So many questions of each folder, drawn by --seed.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0, max=2**32 - 1))
@click.option("--generate", is_flag=True, help="Answer the questions too: seconds each.")
@click.option("--generate-model", metavar="ID", help="Model that answers.  [default: the database's]")
@click.option("--judge-model", metavar="ID", help="Model that scores the answers.")
@click.option("--embed-model", "embed_model_id", metavar="ID", help="Embedding model.  [default: the database's]")
@click.option("--ocr", is_flag=True, help="Read text in pictures of documents.")
@click.option("--segment-tokens", type=int, help="Longest segment, in tokens of the embedding model.")
@click.option("--overlap-tokens", type=int, help="Tokens that neighbouring segments share.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here too.")
@click.option("--keep/--drop", default=True, show_default=True, help="The stores, so that the next time costs less.")
def eval(
    folders: tuple[Path, ...],
    dsn: str,
    schema: str,
    spoken: tuple[str, ...],
    arms: list[str],
    cutoffs: list[int],
    limit: int | None,
    seed: int,
    generate: bool,
    generate_model: str | None,
    judge_model: str | None,
    json_path: Path | None,
    keep: bool,
    **load: Any,
) -> None:
    """Measure the search on folders of documents and questions.

    A folder has corpus.jsonl, questions.jsonl (or queries.jsonl) and qrels.tsv, as BEIR's, or documents in pdf/ or
    docs/ and questions.jsonl that cites their pages. Its documents go into a store of its own; what is there already
    costs nothing. Take a database for it: who may read these stores searches them too where no store is named. Runs
    are kept in ml_rag.evaluation_run. Exit status 1 when a document failed.
    """
    sets = [datasets.read(folder) for folder in folders]
    language = languages(spoken, [dataset.name for dataset in sets])
    chunking = {name: load.pop(name) for name in ("segment_tokens", "overlap_tokens")}
    load["chunking"] = {name: value for name, value in chunking.items() if value is not None} or None
    load["ocr"] = load["ocr"] or None
    options: dict[str, Any] = {"k": cutoffs, "generate": generate or judge_model is not None}
    options |= {"judge_model_id": judge_model, "seed": seed if limit else None}
    if generate_model:
        options["options"] = {"model_options": {"model_id": generate_model}}
    results = []
    with connect(dsn) as connection, Work(Console(stderr=True)) as work:
        for dataset in sets:
            evaluation = Evaluation(connection, dataset, schema, {**load, "language": language[dataset.name] or None})
            try:
                results.append(measure(evaluation, arms, limit, options, work))
            finally:
                if not keep and not connection.broken:
                    evaluation.drop()
    output = Console(width=None if sys.stdout.isatty() else 160)
    for result in results:
        output.print(table(result, cutoffs))
        for arm, run in result["arms"].items():
            if "missing" in run:
                output.print(printable(f"{ARMS[arm].title}: {run['missing']}"), markup=False, highlight=False)
        output.print()
        for failure in result["documents"]["failed"]:
            click.echo(printable(f"failed: {failure['document_name']}: {failure['error']}"), err=True)
    if json_path:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write(json_path, {"at": now, "sets": {result["name"]: result for result in results}})
    sys.exit(1 if any(result["documents"]["failed"] for result in results) else 0)
