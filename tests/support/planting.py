"""A vector store that another role plants in its own schema, and what calls say beside it."""

from __future__ import annotations

import time
from typing import Any

from support.cluster import Connection
from support.stores import answer, as_text, fake_embedding

QUESTION = "contract notice period"
COLUMNS = (
    "document_name text, metadata jsonb, document_id bigint, segment_number integer, segment text, "
    "segment_embedding vector(16)"
)
NEAR = as_text(fake_embedding(QUESTION))
ROW = f"('planted', '{{}}', 1, 1, 'contract notice planted', '{NEAR}')"

#: a function that gives a text which is not valid in the encoding of the database: the message of an error that has cut
#: a value amid a character
BROKEN = (
    "CREATE FUNCTION pg_temp.broken() RETURNS text LANGUAGE plpgsql AS"
    " $$ BEGIN PERFORM to_date('aaé', 'YYY'); EXCEPTION WHEN OTHERS THEN RETURN SQLERRM; END $$"
)


def publish(attacker: Connection, statements: str = "", table: str = "evil.kb") -> None:
    """Run them, declare the table a vector store, and let everybody read the schema."""
    attacker.execute(statements)
    if "COMMENT ON" not in statements:
        attacker.execute(f"COMMENT ON COLUMN {table}.segment_embedding IS 'GENAI_OPTIONS=EMBED_MODEL_ID=fake-embed'")
    attacker.execute("GRANT SELECT ON ALL TABLES IN SCHEMA evil TO PUBLIC")


def warnings(connection: Connection) -> list[tuple[str, str]]:
    """Warnings on this connection from now on, as (message, detail)."""
    said: list[tuple[str, str]] = []

    def keep(d: Any) -> None:
        if d.severity_nonlocalized == "WARNING":
            said.append((d.message_primary or "", d.message_detail or ""))

    connection.add_notice_handler(keep)
    return said


def ask(connection: Connection, **options: Any) -> tuple[dict[str, Any], float]:
    """The document of ``QUESTION``, and the seconds it took."""
    began = time.monotonic()
    document = answer(connection, QUESTION, {"skip_generate": True, "n_citations": 10, **options})
    return document, time.monotonic() - began


def texts(document: dict[str, Any]) -> list[str]:
    """The good store's citations; the planted one's all hold the word."""
    return [c["segment"] for c in document["citations"] if "planted" not in c["segment"]]
