"""The model's own chat template, written so that no message can speak the template's control tokens.

The template is rendered with a marker in place of each content. Where the rendered prompt, contents filled in, names
exactly the control tokens that the template itself writes, it is tokenized in one go, as llama.cpp does. Where a
content brings some in (or makes one together with the text beside it), the pieces are tokenized one by one, the
contents as plain text, so that ``<|im_end|>`` in a document stays eight characters and ends nothing.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import jinja2
from llama_cpp import llama_chat_format

from ml_rag.errors import InvalidRequest, ModelUnavailable
from ml_rag.server.engines.llama_native import NativeModel

# What llama.cpp takes for a model that brings no template.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


#: for files that bring no template, or a wrong one
FORMATS = {
    "chatml": _CHATML,
    "llama-3": llama_chat_format.LLAMA3_INSTRUCT_CHAT_TEMPLATE,
    "mistral-instruct": llama_chat_format.MISTRAL_INSTRUCT_CHAT_TEMPLATE,
    "mixtral-instruct": llama_chat_format.MIXTRAL_INSTRUCT_CHAT_TEMPLATE,
}


class ChatTemplate:
    """Messages to tokens, generation prompt included.

    Raises ``ModelUnavailable``: no format has that name, or the model's template cannot be compiled.
    """

    def __init__(self, model: NativeModel, chat_format: str | None = None) -> None:
        self._model = model
        if chat_format is not None and chat_format not in FORMATS:
            raise ModelUnavailable(
                f"unknown chat_format {chat_format!r}", hint=f"The catalogue may name {', '.join(FORMATS)}."
            )
        template = FORMATS[chat_format] if chat_format else model.chat_template() or _CHATML
        try:
            self._formatter: Any = llama_chat_format.Jinja2ChatFormatter(
                template=template,
                eos_token=model.token_text(model.end_token),
                bos_token=model.token_text(model.begin_token),
            )
        except jinja2.TemplateError as error:
            raise ModelUnavailable("the model's chat template is broken", detail=str(error)) from error
        special = model.special_tokens()
        # Longest first, as the tokenizer looks for them.
        names = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._turn_tokens: frozenset[int] | None = None
        self._last: tuple[list[dict[str, str]], list[int]] | None = None

    @property
    def turn_tokens(self) -> frozenset[int]:
        """Control tokens that the template writes around a turn: a model that generates one has ended its own."""
        if self._turn_tokens is None:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            turns.append({"role": "user", "content": "c"})
            self._turn_tokens = frozenset(t for t in self.encode(turns) if self._model.is_control(t))
        return self._turn_tokens

    def encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of the messages.

        Raises ``InvalidRequest``: the template refuses them, e.g. for their roles.
        """
        # What is generated from has most often just been counted.
        if self._last is None or self._last[0] != list(messages):
            self._last = [dict(message) for message in messages], self._encode(messages)
        return list(self._last[1])

    def _encode(self, messages: Sequence[dict[str, str]]) -> list[int]:
        contents = [message["content"] for message in messages]
        pieces, order = self._pieces([message["role"] for message in messages], contents)
        filled = [piece + content for piece, content in zip(pieces, [contents[i] for i in order] + [""], strict=True)]
        whole = "".join(filled)
        own = [name for piece in pieces for name in self._special.findall(piece)]
        if self._special.findall(whole) == own:
            tokens = self._model.tokenize(whole, special=True)
        else:
            tokens = []
            for position, piece in enumerate(pieces):
                tokens += self._model.tokenize(piece, special=True)
                if position < len(order):
                    tokens += self._plain(contents[order[position]])
        begin = self._model.begin_token
        if self._model.wants_begin_token and begin >= 0 and tokens[:1] != [begin]:
            tokens.insert(0, begin)
        return tokens

    def _plain(self, content: str) -> list[int]:
        # User-defined tokens are recognised even in plain text; only control tokens must not be, so a name that
        # survives is broken up after its first character.
        tokens = self._model.tokenize(content, special=False)
        if not any(self._model.is_control(token) for token in tokens):
            return tokens
        broken = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", content)
        return self._model.tokenize(broken, special=False)

    def _pieces(self, roles: Sequence[str], contents: Sequence[str]) -> tuple[list[str], list[int]]:
        """The template's own text around the contents, and which content stands in each gap."""
        nonce = secrets.token_hex(8)
        marks = [f"\ue000{nonce}.{i}\ue001" for i in range(len(contents))]
        marked = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self._render(marked)
        except jinja2.TemplateError as error:
            raise InvalidRequest("the model's chat template failed", detail=str(error)) from error
        except ValueError as error:
            # raise_exception in a template: some know no system role, and take it as part of the first question.
            if len(marked) < 2 or marked[0]["role"] != "system" or marked[1]["role"] != "user":
                raise InvalidRequest("the model does not take these messages", detail=str(error)) from error
            first = {"role": "user", "content": f"{marks[0]}\n\n{marks[1]}"}
            try:
                text = self._render([first, *marked[2:]])
            except (ValueError, jinja2.TemplateError) as again:
                raise InvalidRequest("the model does not take these messages", detail=str(again)) from again
        parts = re.split(rf"\ue000{nonce}\.(\d+)\ue001", text)
        return parts[::2], [int(number) for number in parts[1::2]]

    def _render(self, messages: list[dict[str, str]]) -> str:
        rendered: str = self._formatter(messages=messages).prompt
        return rendered
