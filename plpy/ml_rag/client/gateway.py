"""``ml-rag gateway``: chat clients that speak OpenAI's protocol, answered from the documents of the database."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import psycopg
from psycopg import sql

from ml_rag.client.dsn import dsn_option
from ml_rag.errors import InvalidRequest, MlRagError
from ml_rag.search_path import refuse_borrowed_role


def _print_token(ctx: click.Context, param: click.Parameter, role: str | None) -> None:
    if role is None or ctx.resilient_parsing:
        return
    from ml_rag.integrations.gateway import digest

    token = f"mlrag-{secrets.token_urlsafe(32)}"
    click.echo(token, err=True)
    click.echo("The token is shown this once: the file has only its hash.", err=True)
    # what JSON quotes, TOML reads
    click.echo(f'[tokens.{digest(token)[:8]}]\nsha256 = "{digest(token)}"\nrole = {json.dumps(role)}\n')
    ctx.exit()


def _try_role(connection: psycopg.Connection, role: str) -> None:
    """Check that the gateway may become this role, before the first request."""
    superuser = "SELECT FROM pg_catalog.pg_roles WHERE rolname = %s AND rolsuper"
    if connection.execute(superuser, (role,)).fetchone() is not None:
        raise MlRagError(f'a token is bound to the superuser "{role}"', hint="Bind it to a role that only asks.")
    try:
        connection.execute("SELECT pg_catalog.set_config('role', %s, true)", (role,))
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidParameterValue) as error:
        names = sql.Identifier(role).as_string(), sql.Identifier(connection.info.user).as_string()
        raise MlRagError(
            f'the role "{role}" of a token cannot be taken',
            detail=error.diag.message_primary,
            hint="The role of the DSN must be a member of it: GRANT {} TO {};".format(*names),
        ) from None
    connection.execute("RESET ROLE")


def _try_preset(connection: psycopg.Connection, name: str, options: Mapping[str, Any], role: str) -> None:
    """Check that ``ml_rag`` has these options, before any request. ``role``: of a token; that of the DSN need not
    ask."""
    try:
        wanted = json.dumps(options)
    except TypeError as error:
        raise InvalidRequest(f'the options of model "{name}" are not JSON', detail=str(error)) from None
    try:
        connection.execute("SELECT pg_catalog.set_config('role', %s, true)", (role,))
        connection.execute("SELECT ml_rag._parse_rag_options(%s::pg_catalog.jsonb)", (wanted,))
    except psycopg.errors.InsufficientPrivilege as error:
        raise MlRagError(
            f'the role "{role}" of a token may not ask',
            detail=error.diag.message_primary,
            hint=f"GRANT ml_rag_user TO {sql.Identifier(role).as_string()};",
        ) from None
    except psycopg.errors.DataError as error:
        about = error.diag
        raise InvalidRequest(
            f'model "{name}" has wrong options: {about.message_primary}',
            detail=about.message_detail,
            hint=about.message_hint,
        ) from None
    connection.execute("RESET ROLE")


@click.command()
@click.option(
    "--new-token", metavar="ROLE", callback=_print_token, expose_value=False, is_eager=True,
    help="Print a new token for a role to stderr, and its entry of the file to stdout.",
)  # fmt: skip
@dsn_option
@click.option(
    "--config", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="TOML with the tokens and the models.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8620, show_default=True, type=click.IntRange(1, 65535), help="Its port.")
@click.option("--connections", default=8, show_default=True, type=click.IntRange(1, 1000), help="To the database.")
def gateway(dsn: str, config: Path, host: str, port: int, connections: int) -> None:
    """Serve /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/rerank and /v1/models.

    The role of the DSN must be a member of the roles of the tokens, and needs no other privilege.
    """
    from ml_rag.integrations.connections import serve
    from ml_rag.integrations.gateway import Config, app

    wanted = Config.read(config)
    made = app(dsn, wanted, connections)
    with psycopg.connect(dsn) as connection:
        refuse_borrowed_role(connection)
        for role in sorted(set(wanted.tokens.values())):
            _try_role(connection, role)
            for name, options in wanted.models.items():
                _try_preset(connection, name, options, role)

    def ready(address: str) -> None:
        click.echo(f"listening on {address}/v1, models: {', '.join(wanted.models)}", err=True)

    serve(made, host, port, connections, ready)
