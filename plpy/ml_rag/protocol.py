"""What a backend and the model server both know: where requests and datagrams go, what calls are called.

Standard library only: this module is imported in the PostgreSQL backend too.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

#: header of a request to the model server: the call that makes it, in the form of a datagram
CALL_HEADER = "X-ML-RAG-Call"
#: of the datagram socket, behind the path of the unix socket; over TCP it is the UDP port of the same number
DATAGRAM_SUFFIX = ".calls"
#: routines that tell of their calls, and stages of these
ROUTINES = frozenset(
    (
        *("ml_rag", "ml_rag_search", "ml_rag_table", "ml_generate", "ml_generate_table", "ml_embed_row"),
        *("ml_embed_table", "vector_store_load", "ml_rank", "ml_rank_rows", "ml_rag_evaluate", "ml_rag.load_documents"),
        *("ml_rag.enable_keyword_search", "ml_rag.add_embedding", "ml_rag.embed", "ml_rag.rerank", "ml_rag.generate"),
        *("ml_retrieve_schema_metadata", "ml_nl_sql", "ml_rag.rewrite", "ml_rag.run_vectorizer"),
        *("ml_rag_chat", "heatwave_chat", "ml_rag.calibrate", "ml_rag.tune_index", "ml_rag.why_not"),
        *("ml_rag.create_node_group", "ml_rag.refresh_node_groups", "ml_check_grounding", "ml_rag.make_questions"),
    )
)
#: those of them for whose results no user waits
BULK = frozenset(
    (
        *("ml_rag_table", "ml_generate_table", "ml_embed_table", "vector_store_load", "ml_rag.load_documents"),
        *("ml_rag.add_embedding", "ml_rag.run_vectorizer", "ml_rag.create_node_group", "ml_rag.refresh_node_groups"),
        *("ml_rag_evaluate", "ml_rag.calibrate", "ml_rag.tune_index", "ml_rag.enable_keyword_search"),
        "ml_rag.make_questions",
    )
)
STAGES = frozenset(
    (
        *("discover", "embed", "search", "keyword", "fuse", "threshold", "text", "rerank", "expand", "generate"),
        *("load", "index", "judge", "rewrite", "read", "function", "ground"),
    )
)
#: segments of one document, whether the model server or a function splits it
MAX_SEGMENTS = 100_000
#: values in the JSON of a reply of the model server, or a line of it, and of a parser: parsing them cannot be
#: cancelled, and takes 26 times as much memory if all of it is values
MAX_REPLY_VALUES = 2 * 1024 * 1024
#: in place of a stage: the whole call
TOTAL = "total"
SUCCESS = "00000"
CANCELLED = "57014"
#: of a call whose session ended before it did
TERMINATED = "terminated"
#: bytes of JSON in which values are counted at once
_PIECE = 256 * 1024


def has_more_values(text: bytes | bytearray, most: int) -> bool:
    """Whether JSON has more values than that, without parsing it, which takes up to 3 us and 200 bytes for each."""
    if sum(map(_separators, _pieces(text))) <= most:
        return False
    # texts may have as many commas as they like
    values = quotes = 0
    escape = b""
    for piece in _pieces(text):
        quoted = (escape + piece).replace(rb"\\", b"").replace(rb"\"", b"")
        escape = b"\\" if quoted.endswith(b"\\") else b""
        parts = quoted.split(b'"')
        values += _separators(b"".join(parts[quotes % 2 :: 2]))
        quotes += len(parts) - 1
        if values > most or quotes > 4 * most:
            return True
    return False


def _pieces(text: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Between two of them other threads can run, which wait several seconds for 256 MB."""
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _separators(text: bytes | bytearray) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


def request_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """Family and address of the stream socket.

    Raises OSError or ValueError for a host that is not an IP address: a look-up would block, and PostgreSQL's
    interrupts would have to wait for the resolver's time-outs.
    """
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    flags = socket.AI_NUMERICHOST
    family, _, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=flags)[0]
    return family, target


def datagram_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """The same of the datagram socket."""
    family, target = request_address(address)
    return family, target + DATAGRAM_SUFFIX if family == socket.AF_UNIX else target


#: keys of the metadata that every load of a document writes; ``source.keys`` lists what comes from the file beside them
LOAD_KEYS = frozenset({"format", "file_name", "file_type", "file_size", "source", "left_out"}) | {
    "creation_date",
    "last_modified_date",
    "last_accessed_date",
}
