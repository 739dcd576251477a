"""``ml-rag explore``: a page of this machine that shows why an answer is what it is."""

from __future__ import annotations

import secrets

import click
import psycopg

from ml_rag.client.dsn import dsn_option


@click.command()
@dsn_option
@click.option("--port", default=8630, show_default=True, type=click.IntRange(1, 65535), help="Port of 127.0.0.1.")
@click.option(
    "--marks", metavar="TABLE", help="Keep marks of citations in this table (docs/explore.md).  [default: none]"
)
@click.option("--connections", default=4, show_default=True, type=click.IntRange(1, 100), help="To the database.")
def explore(dsn: str, port: int, marks: str | None, connections: int) -> None:
    """Show in a browser how answers come about.

    Everything is read as the role of the DSN, in read-only transactions; only marks and uploaded documents are written.
    The address that is printed has a token; any user who has it may do what the role may do there.
    """
    from ml_rag.integrations.connections import serve
    from ml_rag.integrations.explore import app

    token = secrets.token_urlsafe(32)
    psycopg.connect(dsn).close()
    made = app(dsn, token, port, marks, connections)
    serve(made, "127.0.0.1", port, connections, lambda address: click.echo(f"{address}/?token={token}"))
