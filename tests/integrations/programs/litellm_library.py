"""LiteLLM as a library: whole, streamed, with tools. Arguments: base URL, token."""

import sys

import litellm

URL, TOKEN = sys.argv[1:]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASK = {"api_base": URL, "api_key": TOKEN, "messages": [{"role": "user", "content": "boat"}], "num_retries": 0}
for model, addresses in (("pages", 1), ("files", 0)):
    answer = litellm.completion(model=f"openai/{model}", tools=TOOLS, **ASK)
    message = answer.choices[0].message
    assert message.content.startswith("fake answer to: boat"), message
    assert len(message.annotations or []) == addresses, message
    assert answer.usage.total_tokens > 0
    pieces = list(litellm.completion(model=f"openai/{model}", stream=True, **ASK))
    assert "fake answer" in "".join(piece.choices[0].delta.content or "" for piece in pieces)
print("well")
