"""The ``ml-rag`` command. Each subcommand is a module of its own, imported when it is asked for."""

from __future__ import annotations

import importlib

import click

from ml_rag import __version__
from ml_rag.errors import MlRagError
from ml_rag.terminal import printable_lines

#: name of the subcommand, and of its module and the click command in it -> one line for ``ml-rag --help``
COMMANDS = {
    "serve": "Run the model server.",
    "models": "List models and get their files.",
    "load": "Load documents into a vector store, from the client's side.",
    "worker": "Embed the rows that wait in tables with a vectorizer.",
    "eval": "Measure the search on folders of documents and questions.",
    "doctor": "Check the whole chain, and say what to do about what is wrong.",
    "mcp": "Serve search, answers and documents to agents.",
    "gateway": "Serve answers to chat clients, by OpenAI's protocol.",
    "explore": "Show in a browser why an answer is what it is.",
}


#: those that need more packages than the client's -> the extra that brings them
_EXTRAS = {"serve": "server", "models": "server", "mcp": "mcp", "gateway": "gateway", "explore": "explore"}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            package = "server.commands" if _EXTRAS.get(cmd_name) == "server" else "client"
            module = importlib.import_module(f"ml_rag.{package}.{cmd_name}")
        except ModuleNotFoundError as error:
            _name_the_extra(cmd_name, error)
            raise
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MlRagError as error:
            raise _Failure(error) from error
        except ModuleNotFoundError as error:
            _name_the_extra(ctx.invoked_subcommand, error)
            raise


def _name_the_extra(command: str | None, error: ModuleNotFoundError) -> None:
    """Raise what to install where a command of an extra runs beside the client's packages only."""
    extra = _EXTRAS.get(command or "")
    if extra is not None and error.name and error.name.partition(".")[0] != "ml_rag":
        brought = "the model server" if extra == "server" else f"the extra {extra}"
        raise _ExtraMissing(
            f"ml-rag {command} needs the package {error.name}, which comes with {brought}: "
            f'pip install ".[{extra}]" in a checkout of ml_rag'
        ) from error


class _ExtraMissing(click.ClickException):
    """The packages of an extra are not installed."""

    exit_code = 2


class _Failure(click.ClickException):
    """One of our errors, as a person at a terminal wants to read it."""

    def __init__(self, error: MlRagError) -> None:
        super().__init__(printable_lines("\n  ".join(filter(None, (error.message, error.detail, error.hint)))))


@click.command(
    cls=_LazyGroup,
    commands=[click.Command(name) for name in COMMANDS],  # what a mistyped name is compared with
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="ml-rag")
def main() -> None:
    """Retrieval-augmented generation inside PostgreSQL: the model server and its tools."""


if __name__ == "__main__":
    main()
