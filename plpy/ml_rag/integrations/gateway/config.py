"""The file of the gateway: who may ask, and what the models are."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ml_rag.errors import InvalidRequest
from ml_rag.integrations.gateway.citations import STYLES


@dataclass(frozen=True)
class Config:
    """The file of the gateway: ``tokens`` (SHA-256 in hex -> role) and ``models`` (name -> options of ml_rag)."""

    tokens: Mapping[str, str]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"ml_rag": {"abstain": True}})
    #: the address of a document whose name is none, with {document_name} or {file_name} in it
    document_url: str | None = None
    #: how citations reach the user, one of STYLES
    citations: str = "auto"
    #: how prompts begin by which a program asks for titles, tags and the like; these are Open WebUI's
    tasks: Sequence[str] = ("### Task:",)
    #: where the model server is, for streams: see ``Writer``
    model_server: str | None = None
    #: pages of other sites that may ask from a browser, such as "https://chat.example.org"
    origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        url = self.document_url
        if url is not None and not (
            isinstance(url, str) and re.match("https?://", url) and ("{document_name}" in url or "{file_name}" in url)
        ):
            raise InvalidRequest(
                "document_url is not the address of a document",
                hint='Such as "https://files.example.org/{document_name}"; {file_name} is its name without folders.',
            )
        for key, value in {"tasks": self.tasks, "origins": self.origins}.items():
            if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value):
                raise InvalidRequest(f"{key} is not a list of texts")
        server = self.model_server
        if server is not None and not (isinstance(server, str) and re.match("unix:/|https?://|none$", server)):
            raise InvalidRequest(
                "model_server is not an address", hint='Such as "unix:/run/ml_rag.sock", "http://host:8100" or "none".'
            )
        if self.citations not in STYLES:
            raise InvalidRequest("citations is unknown", detail=f"It is one of {', '.join(STYLES)}.")
        for name, options in self.models.items():
            if options.get("skip_generate"):
                raise InvalidRequest(
                    f'model "{name}" has "skip_generate"',
                    detail="Without an answer there is nothing to send to a chat client.",
                    hint="Leave the option out; ml_rag_search and ml-rag mcp search without an answer.",
                )

    @classmethod
    def read(cls, path: Path) -> Config:
        """Raises MlRagError where the file is not as it should be, without repeating what stands in it."""
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequest(f"cannot read {path}", detail=str(error)) from None
        known = [field.name for field in fields(cls)]
        if unknown := content.keys() - set(known):
            raise InvalidRequest(
                f"unknown keys in {path}", detail=f"{', '.join(sorted(unknown))}; there are {', '.join(known)}."
            )
        tokens = {}
        for name, token in content.get("tokens", {}).items():
            if not isinstance(token, dict) or token.keys() != {"sha256", "role"}:
                raise InvalidRequest(f'token "{name}" in {path} must have "sha256" and "role"')
            # "none" would stand for the role of the DSN
            if (
                not isinstance(token["role"], str)
                or token["role"] in ("", "none")
                or not re.fullmatch("[0-9a-f]{64}", str(token["sha256"]))
            ):
                raise InvalidRequest(f'token "{name}" in {path} is not 64 hexadecimal digits with the name of a role')
            tokens[token["sha256"]] = token["role"]
        if not tokens:
            raise InvalidRequest(f"no tokens in {path}", hint="ml-rag gateway --new-token ROLE makes one.")
        models = content.get("models")
        if models is not None and (not models or not all(isinstance(options, dict) for options in models.values())):
            raise InvalidRequest(f"models in {path} are not tables of options")
        return cls(**{**content, "tokens": tokens})

    def find(self, token: str) -> tuple[str, str] | None:
        """The hash and the role of a token; None if it is unknown. The time it takes says nothing of the tokens."""
        given, found = digest(token), None
        for sha256, role in self.tokens.items():
            if hmac.compare_digest(given, sha256):
                found = sha256, role
        return found


def digest(token: str) -> str:
    """What is kept of a token. It is random, so a fast hash will do."""
    return hashlib.sha256(token.encode()).hexdigest()
