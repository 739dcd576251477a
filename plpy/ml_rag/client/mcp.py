"""``ml-rag mcp``: what a role may see of the database, for agents that speak the Model Context Protocol."""

from __future__ import annotations

import click
import psycopg

from ml_rag.client.dsn import dsn_option

_MODEL_SERVER = (
    'Where it is from here, so that answers come as they are written; "none": in one piece.  [default: where the'
    " database has it, if that is a unix socket]"
)


@click.command()
@dsn_option
@click.option("--http", is_flag=True, help="Listen for streamable HTTP, at /mcp.  [default: stdin and stdout]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on, with --http.")
@click.option("--port", default=8610, show_default=True, type=click.IntRange(1, 65535), help="Its port.")
@click.option("--connections", default=4, show_default=True, type=click.IntRange(1, 100), help="To the database.")
@click.option("--model-server", metavar="ADDRESS", help=_MODEL_SERVER)
def mcp(dsn: str, http: bool, host: str, port: int, connections: int, model_server: str | None) -> None:
    """Serve search, answer, list_stores, list_options and read_document to an agent.

    All run as the role of the DSN, in read-only transactions. --http asks for no password: any user who can reach the
    port reads what the role may read.
    """
    from ml_rag.integrations.mcp import over_http, server

    psycopg.connect(dsn).close()
    made = server(dsn, connections, model_server)
    if http:
        from ml_rag.integrations.connections import serve

        def ready(address: str) -> None:
            click.echo(f"listening on {address}/mcp", err=True)

        serve(over_http(made, host), host, port, connections, ready)
    else:
        made.run("stdio")
