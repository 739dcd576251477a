"""``ml-rag serve``: run the model server."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click

from ml_rag.server.catalogue import DEFAULT_MODELS, load_catalogue
from ml_rag.server.catalogue import models_dir as choose_models_dir


@click.command()
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="ML_RAG_SOCKET",
    help="Path of the unix socket.  [env: ML_RAG_SOCKET; default: socket of the configuration]",
)
@click.option("--listen", metavar="HOST:PORT", help="Listen on TCP too. No peer check there: keep it on 127.0.0.1.")
@click.option("--no-socket", is_flag=True, help="Do not open the unix socket (only with --listen).")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Configuration.  [env: ML_RAG_CONFIG]")
@click.option("--models-dir", type=click.Path(path_type=Path, file_okay=False), help="[env: ML_RAG_MODELS]")
@click.option("--fake-models", is_flag=True, help="Offer the deterministic fake models too.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
def serve(
    socket_path: Path | None,
    listen: str | None,
    no_socket: bool,
    config: Path | None,
    models_dir: Path | None,
    fake_models: bool,
    log_level: str | None,
) -> None:
    """Run the model server until SIGTERM.

    Prints one line "ml-rag VERSION ready on ADDRESS..." once it answers; the log goes to standard error.
    """
    catalogue = load_catalogue(config, fake_models=True if fake_models else None)
    server = catalogue.server
    listen = listen or server.listen
    if no_socket and listen is None:
        raise click.UsageError("--no-socket needs --listen HOST:PORT")
    logging.basicConfig(
        level=(log_level or server.log_level).upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # chatty libraries: their request lines may hold more than a log should
    for name in ("httpx", "httpcore", "urllib3", "huggingface_hub", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # tokenizers forked with its threads running warns; parsing forks
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    from ml_rag import __version__
    from ml_rag.ingest.confine import hide
    from ml_rag.server.notify import notify
    from ml_rag.server.serve import exit_now
    from ml_rag.server.serve import serve as run

    def ready(addresses: list[str]) -> None:
        click.echo(f"ml-rag {__version__} ready on {' '.join(addresses)}")
        notify("READY=1", f"STATUS=ready on {' '.join(addresses)}")

    folder = choose_models_dir(catalogue, models_dir)
    for model_id in DEFAULT_MODELS:
        if (entry := catalogue.get(model_id)) is not None and (reason := entry.missing(folder)):
            how = f"; get it with: {command}" if (command := entry.pull_into(folder)) else ""
            logging.getLogger("ml_rag.server").warning("default model %s: %s%s", model_id, reason, how)

    hide()  # the keys of remote models, from document parsers, which run as the same user
    path = None if no_socket else (socket_path or Path(server.socket)).absolute()
    run(catalogue, folder, path, listen, ready)
    exit_now()
