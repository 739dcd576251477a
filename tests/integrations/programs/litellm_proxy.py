"""LiteLLM as a proxy: chat, responses, streams, tools, citations, embeddings, and what an error leaves behind.

Arguments: base URL, token.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

URL, TOKEN = sys.argv[1:]
MODELS = {"pages": "pages", "files": "files", "strict": "strict", "embed": "fake-embed"}
KEY = "sk-made-for-a-test-and-not-a-known-one"
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
DEMANDING = {"tools": TOOLS, "tool_choice": "required"}


def entry(name: str, model: str) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": f"openai/{model}", "api_base": URL, "api_key": TOKEN}}


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "config.yaml", Path(folder) / "log"
        settings = {
            "model_list": [entry(*names) for names in MODELS.items()],
            "general_settings": {"master_key": KEY},
        }
        config.write_text(json.dumps(settings))  # YAML too
        command = [Path(sys.executable).parent / "litellm", "--config", config, "--host", "127.0.0.1", "--port", port]
        with log.open("w") as out, subprocess.Popen(command, cwd=folder, stdout=out, stderr=out) as process:
            try:
                until = time.monotonic() + 120
                while True:
                    assert process.poll() is None, log.read_text()[-3000:]
                    assert time.monotonic() < until, log.read_text()[-3000:]
                    with contextlib.suppress(httpx.HTTPError):
                        httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).raise_for_status()
                        break
                    time.sleep(0.2)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                process.terminate()


def ask(text: str = "boat") -> Any:
    return [{"role": "user", "content": text}]


def refusal(request: dict[str, Any]) -> openai.APIStatusError:
    try:
        client.chat.completions.create(**request)
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it was answered")


os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
with proxy() as address:
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=60)
    for model, addresses in (("pages", 1), ("files", 0)):
        for choice in ("auto", "none"):
            answer = client.chat.completions.create(model=model, messages=ask(), tools=TOOLS, tool_choice=choice)
            message = answer.choices[0].message
            assert (message.content or "").startswith("fake answer to: boat"), message
            assert len(message.annotations or []) == addresses, message
            assert answer.usage is not None
            assert answer.usage.total_tokens > 0
        stream: Any = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = list(client.chat.completions.create(model=model, messages=ask(), **stream))
        deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
        assert "".join(delta.content or "" for delta in deltas) == message.content
        assert sum(len(getattr(delta, "annotations", None) or []) for delta in deltas) == addresses
        assert pieces[-1].usage == answer.usage
        response = client.responses.create(model=model, input="boat")
        assert response.output_text == message.content
        (item,) = response.output
        assert len(item.content[0].annotations) == addresses
        events = list(client.responses.create(model=model, input="boat", stream=True))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == message.content
    assert len(client.embeddings.create(model="embed", input="boat").data[0].embedding) == 16
    # what one question cannot have is no reason to answer none of the next ones
    strict: Any = {"model": "strict", "messages": ask("blue boat")}
    for _ in range(3):
        nothing, demanded = refusal({**strict, "messages": ask("house")}), refusal({**strict, **DEMANDING})
        assert (nothing.status_code, demanded.status_code) == (422, 400)
        assert "nothing was found" in nothing.message
        assert "tools are not called here" in demanded.message
        answer = client.chat.completions.create(**strict)
        assert (answer.choices[0].message.content or "").startswith("fake answer to: blue boat")
print("well")
