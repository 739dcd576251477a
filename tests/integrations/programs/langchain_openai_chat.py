"""langchain-openai: chat, bind_tools, structured output, embeddings. Arguments: base URL, token."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, TOKEN = sys.argv[1:]


class Boat(BaseModel):
    """What is asked for."""

    color: str


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


for model in ("pages", "files"):
    chat = ChatOpenAI(model=model, base_url=URL, api_key=TOKEN, max_retries=0)
    assert chat.invoke("boat").text.startswith("fake answer to: boat")
    assert chat.bind_tools([look]).invoke("boat").tool_calls == []
    assert "fake answer" in "".join(piece.text for piece in chat.stream("boat"))
    assert chat.with_structured_output(Boat, method="json_schema").invoke("boat") == Boat(color="")
    plain = ChatOpenAI(model=model, base_url=URL, api_key=TOKEN, max_retries=0, use_responses_api=True)
    assert plain.invoke("boat").text.startswith("fake answer to: boat")
embeddings = OpenAIEmbeddings(
    model="fake-embed", base_url=URL, api_key=TOKEN, check_embedding_ctx_length=False, max_retries=0
)
assert len(embeddings.embed_query("boat")) == 16
print("well")
