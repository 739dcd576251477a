"""The option ``--dsn``, checked without repeating it: libpq quotes what it cannot read, which may be a password; and
what a command says of errors of that database."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
import psycopg
from psycopg.conninfo import conninfo_to_dict

from ml_rag.terminal import printable_lines


def _checked(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        conninfo_to_dict(value)
    except psycopg.ProgrammingError:
        raise click.BadParameter(
            "it is neither key=value pairs nor a postgresql:// URI. A value with blanks stands in single quotes; "
            "in a URI a blank is %20. Or it has a parameter that libpq does not know.",
            ctx,
            param,
        ) from None
    return value


def explained(error: psycopg.Error) -> click.ClickException:
    """A database error as a person at a terminal wants to read it."""
    diagnostic = error.diag
    lines = [diagnostic.message_primary or str(error).strip()]
    lines += [f"  {text}" for text in (diagnostic.message_detail, diagnostic.message_hint) if text]
    if isinstance(error, psycopg.errors.InvalidSchemaName | psycopg.errors.UndefinedFunction):
        lines.append("  Run CREATE EXTENSION ml_rag CASCADE in this database, or ALTER EXTENSION ml_rag UPDATE.")
    elif isinstance(error, psycopg.errors.InsufficientPrivilege) and not diagnostic.message_hint:
        lines.append("  Needed: GRANT ml_rag_loader TO this role, USAGE on the schema, CREATE there for a new store.")
    elif isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        lines.append(
            "  Check --dsn (or ML_RAG_DSN, PGHOST, PGPORT, PGUSER, PGDATABASE), and that PostgreSQL runs there."
        )
    return click.ClickException(printable_lines("\n".join(lines)))


def dsn_option(command: Callable[..., None]) -> Callable[..., None]:
    """``--dsn``, else ``ML_RAG_DSN``, which no list of processes shows, else libpq's own variables. Errors of the
    database that the command leaves are explained."""

    @functools.wraps(command)
    def explaining(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except psycopg.Error as error:
            raise explained(error) from error

    return click.option(
        "--dsn",
        default="",
        callback=_checked,
        metavar="DSN",
        envvar="ML_RAG_DSN",
        help="libpq connection string.  [env: ML_RAG_DSN, PG…; keeps a password out of the list of processes]",
    )(explaining)
