"""``ml-rag models``: list what the catalogue offers, get the files of a model."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table

from ml_rag.errors import ModelUnavailable, UnknownModel
from ml_rag.server.catalogue import Catalogue, ModelEntry, load_catalogue
from ml_rag.server.catalogue import models_dir as choose_models_dir
from ml_rag.server.pull import PullFailed, Report, pulled_bytes
from ml_rag.server.pull import pull as pull_model
from ml_rag.work import Work

Command = TypeVar("Command", bound=Callable[..., None])


def _where(command: Command) -> Command:
    """The options that say which catalogue and which folder; each may stand before or after the subcommand."""
    command = click.option(
        "--models-dir", type=click.Path(path_type=Path, file_okay=False), help="[env: ML_RAG_MODELS]"
    )(command)
    return click.option(
        "--config", type=click.Path(path_type=Path, dir_okay=False), help="Configuration.  [env: ML_RAG_CONFIG]"
    )(command)


def _catalogue(ctx: click.Context, config: Path | None, models_dir: Path | None) -> tuple[Catalogue, Path]:
    before = ctx.obj or {}
    catalogue = load_catalogue(config or before.get("config"))
    return catalogue, choose_models_dir(catalogue, models_dir or before.get("models_dir"))


@click.group()
@_where
@click.pass_context
def models(ctx: click.Context, config: Path | None, models_dir: Path | None) -> None:
    """List models and get their files."""
    ctx.obj = {"config": config, "models_dir": models_dir}


@models.command("list")
@_where
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def list_models(ctx: click.Context, config: Path | None, models_dir: Path | None, as_json: bool) -> None:
    """Print every model of the catalogue, and whether its files are there."""
    catalogue, folder = _catalogue(ctx, config, models_dir)
    if as_json:
        rows = [
            {
                "id": entry.id,
                "task": entry.task,
                "engine": entry.engine,
                "languages": entry.languages,
                "megabytes": entry.megabytes,
                "license": entry.license,
                "commercial_use": not entry.is_noncommercial,
                "description": entry.description,
                "dimensions": entry.dimensions,
                "min_dimensions": entry.min_dimensions,
                "max_tokens": entry.max_tokens or entry.context_tokens,
                "available": entry.missing(folder) is None,
                "reason": entry.missing(folder),
                "pull": entry.pull_command,
            }
            for entry in catalogue
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=f"Models (files in {folder})", title_justify="left")
    table.add_column("model", no_wrap=True)
    for heading in ("task", "MB", "dimensions", "tokens", "here", "good for"):
        table.add_column(heading)
    for entry in catalogue:
        tokens = entry.max_tokens or entry.context_tokens
        table.add_row(
            entry.id,
            entry.task,
            str(entry.megabytes or ""),
            f"{entry.min_dimensions}-{entry.dimensions}" if entry.min_dimensions else str(entry.dimensions or ""),
            str(tokens or ""),
            "yes" if entry.missing(folder) is None else "no",
            good_for(entry),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def good_for(entry: ModelEntry) -> str:
    """The description, with what is to be known before the model is taken."""
    thinks = ["thinks before it answers, so give it many max_tokens"] if entry.thinks else []
    licence = [f"not for commercial use ({entry.license})"] if entry.is_noncommercial else []
    return "; ".join([entry.description, *thinks, *licence])


def _codes(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for code in given:
        if not re.fullmatch(r"[a-zA-Z]{2,3}(-[a-zA-Z0-9]{2,8})*|\*", code):
            raise click.BadParameter(f"{code!r} is not a code of ISO 639, such as de or pt-BR, or * for many languages")
    return given


@models.command("recommend")
@_where
@click.option(
    "--language",
    "languages",
    multiple=True,
    metavar="CODE",
    callback=_codes,
    help="Of the texts, such as de; several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def recommend(
    ctx: click.Context, config: Path | None, models_dir: Path | None, languages: tuple[str, ...], as_json: bool
) -> None:
    """Print the models that fit the memory, cores and GPU of this machine and the languages of the texts.

    Without --language: English and others.
    """
    from ml_rag.server.recommend import TASKS, this_machine, why_none
    from ml_rag.server.recommend import recommend as choose

    catalogue, folder = _catalogue(ctx, config, models_dir)
    machine = this_machine()
    languages = languages or ("en", "*")
    chosen = choose(catalogue, machine, languages)
    if as_json:
        rows = [{"task": entry.task, "id": entry.id, "megabytes": entry.megabytes} for entry in chosen]
        click.echo(json.dumps({"machine": asdict(machine), "models": rows}, indent=2))
        return
    gpu = f"a GPU of {machine.gpu} MB" if machine.gpu else "no GPU"
    click.echo(f"For {machine.memory} MB of memory, {machine.cores} cores, {gpu}:")
    for entry in chosen:
        state = "here" if entry.missing(folder) is None else entry.pull_command
        click.echo(f"  {entry.task:8} {entry.id} ({entry.megabytes} MB; {entry.description}): {state}")
    for task in TASKS:
        if task not in {entry.task for entry in chosen}:
            other = '; model "hybrid" needs no files' if task == "rerank" else ""
            click.echo(f"  {task:8} {why_none(catalogue, machine, languages, task)}{other}")
    settings = {"embed": "embed_model_id", "rerank": "rerank_model_id", "generate": "generate_model_id"}
    click.echo("Make them the defaults of a database:")
    for entry in chosen:
        click.echo(f"  SELECT ml_rag.configure('{settings[entry.task]}', '{entry.id}');")


@models.command("pull")
@_where
@click.argument("model_ids", nargs=-1, required=True, metavar="ID...")
@click.option("--force", is_flag=True, help="Get the files again even if they are there and right.")
@click.pass_context
def pull(
    ctx: click.Context, config: Path | None, models_dir: Path | None, model_ids: tuple[str, ...], force: bool
) -> None:
    """Get the files of models, check their SHA-256, put them into the models folder, make them ready to load."""
    catalogue, folder = _catalogue(ctx, config, models_dir)
    entries = [_entry(catalogue, model_id) for model_id in model_ids]
    console = Console(stderr=True)
    failed: list[PullFailed] = []
    for entry in entries:
        began = time.monotonic()
        with _shown(console, entry, folder) as report:
            try:
                place = pull_model(entry, folder, report, force=force)
                if entry.engine == "sentence-transformers" and entry.task == "embed" and entry.device == "cpu":
                    from ml_rag.server.engines.sentence_transformers import prepare

                    report("exporting to ONNX, once")
                    prepare(entry, folder)
            except ModelUnavailable as error:
                click.echo(f"Warning: {error.message}: {error.detail}\n  {error.hint}", err=True)
            except PullFailed as error:
                failed.append(error)
                continue
        click.echo(f"{entry.id}: {place} ({time.monotonic() - began:.1f} s)")
    for failure in failed[:-1]:
        click.echo(f"Error: {failure.message}\n  {failure.detail}\n  {failure.hint}", err=True)
    if failed:
        raise failed[-1]


@contextmanager
def _shown(console: Console, entry: ModelEntry, folder: Path) -> Iterator[Report]:
    """Show what is done, and how many of the model's megabytes are in the folder."""
    ended = threading.Event()
    with Work(console) as work, work.task(f"{entry.id}, MB") as task:

        def count() -> None:
            while not ended.wait(0.5):
                found = pulled_bytes(folder) // 1_000_000
                task.tell(min(found, entry.megabytes or found), entry.megabytes)

        counter = threading.Thread(target=count, daemon=True)
        counter.start()
        try:
            yield task.note
        finally:
            ended.set()
            counter.join()


def _entry(catalogue: Catalogue, model_id: str) -> ModelEntry:
    entry = catalogue.get(model_id)
    if entry is None:
        near = catalogue.nearest(model_id)
        raise UnknownModel(
            f"model {model_id!r} does not exist",
            hint=f"Did you mean {near!r}?" if near else "ml-rag models list prints those there are.",
        )
    return entry
