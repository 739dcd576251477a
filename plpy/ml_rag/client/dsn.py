"""The option ``--dsn``, checked without repeating it: libpq quotes what it cannot read, which may be a password."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click
import psycopg
from psycopg.conninfo import conninfo_to_dict

Command = TypeVar("Command", bound=Callable[..., None])


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


def dsn_option(command: Command) -> Command:
    """``--dsn``, else ``ML_RAG_DSN``, which no list of processes shows, else libpq's own variables."""
    return click.option(
        "--dsn",
        default="",
        callback=_checked,
        metavar="DSN",
        envvar="ML_RAG_DSN",
        help="libpq connection string.  [env: ML_RAG_DSN, PG…; keeps a password out of the list of processes]",
    )(command)
