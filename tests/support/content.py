"""A database with something of everything in it, and what it answers: what an upgrade or a restore must leave as it is.

No model server is asked, so both also run by themselves, against a server that tests are not installed on:

    PYTHONPATH=plpy:tests python -m support.content make DSN ANSWERS.json    # a new database; writes what it answers
    PYTHONPATH=plpy:tests python -m support.content check DSN ANSWERS.json   # status 1 and the differences, or nothing
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from support.cluster import Connection
from support.stores import create_store, fake_embedding, marker

WORDS = ["lease", "boiler", "invoice", "ladder", "harvest", "engine"]
WORDS += ["violin", "glacier", "pepper", "anchor", "meadow", "copper"]

#: role -> what it is a member of; the one who loads owns a store of its own
ROLES = {"asker": "ml_rag_user", "tenant": "ml_rag_user", "loader": "ml_rag_loader"}


#: options of the evaluation runs: by words, as questions bring no embeddings
MEASURED = {"vector_store": ["docs"], "keyword_search": True, "semantic_search": False}

#: options of the turns of conversations
CHAT = {"vector_store": ["docs"], "keyword_search": True, "semantic_search": False, "skip_generate": True}


def text(i: int) -> str:
    return " ".join(WORDS[(i * step + i // 7) % len(WORDS)] for step in (1, 3, 5, 7, 11)) + f" number{i}"


def rows(n: int, first: int = 1) -> list[Any]:
    """Three segments to a document."""
    texts = ((i, text(i)) for i in range(first, first + n))
    return [(f"/srv/{i // 3}.txt", i // 3, i % 3 + 1, t, fake_embedding(t)) for i, t in texts]


def make(owner: Connection, roles: dict[str, str]) -> None:
    """Fill a database that has the extension, through what a user would call. `roles`: real names of ``ROLES``."""
    asker, tenant, loader = (sql.Identifier(roles[name]) for name in ROLES)
    execute = owner.execute
    execute("SELECT ml_rag.configure('abstain_text', 'No idea.'), ml_rag.configure('embed_model_id', 'fake-embed')")
    execute("SELECT ml_rag.create_preset('short', '{\"n_citations\": 2}', 'two citations')")

    # keyword index with a sealed run, rows that wait and rows that are gone, and an approximate index
    create_store(owner, "docs", rows(300), "vector(16)")
    execute("SELECT ml_rag.enable_keyword_search('docs', '{\"language\": \"en\"}')")
    execute("SELECT ml_rag.index_store('docs')")
    execute("DELETE FROM docs WHERE document_id IN (5, 6)")
    execute("UPDATE docs SET segment = 'a ladder of copper' WHERE document_id = 7 AND segment_number = 1")
    insert(owner, "docs", rows(20, 1000))
    execute("CREATE TABLE plain AS SELECT * FROM docs WHERE document_id < 20 ORDER BY document_id, segment_number")
    execute(sql.SQL("COMMENT ON COLUMN plain.segment_embedding IS {}").format(sql.Literal("note " + marker())))
    execute("GRANT SELECT ON plain TO ml_rag_user")

    # other kinds of stores
    create_store(owner, "half", rows(30), "halfvec(16)")
    create_store(owner, "parted", suffix=" PARTITION BY RANGE (document_id)", type="vector(16)")
    execute("CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (5)")
    execute("CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (5) TO (MAXVALUE)")
    insert(owner, "parted", rows(30))
    execute("CREATE VIEW recent AS SELECT * FROM docs WHERE document_id > 80")
    execute("CREATE MATERIALIZED VIEW snapshot AS SELECT * FROM docs WHERE document_id < 40")
    for view in ("recent", "snapshot"):
        name = sql.Identifier(view)
        execute(sql.SQL("COMMENT ON COLUMN {}.segment_embedding IS {}").format(name, sql.Literal(marker())))
        execute(sql.SQL("GRANT SELECT ON {} TO ml_rag_user").format(name))

    # two tenants in one store, and an index whose scores tell nothing about the other's rows
    create_store(owner, "shared", rows(60), "vector(16)")
    execute("ALTER TABLE shared ADD COLUMN tenant name")
    execute(
        "UPDATE shared SET tenant = CASE WHEN document_id %% 2 = 0 THEN %s ELSE %s END",
        (roles["asker"], roles["tenant"]),
    )
    execute("ALTER TABLE shared ENABLE ROW LEVEL SECURITY")
    execute("CREATE POLICY own ON shared USING (tenant = current_user)")
    execute("""SELECT ml_rag.enable_keyword_search('shared', '{"statistics": "visible", "k1": 1.5}')""")

    # a store of somebody who is no superuser, under names that need quoting
    execute(sql.SQL('CREATE SCHEMA "Odd schema" AUTHORIZATION {}').format(loader))
    execute(sql.SQL('GRANT USAGE ON SCHEMA "Odd schema" TO {}').format(asker))
    execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(loader))
    create_store(owner, sql.Identifier("Odd schema", 'we"ird'), rows(12), "vector(16)")
    execute("""SELECT ml_rag.enable_keyword_search('"Odd schema"."we""ird"', '{"language": "de"}')""")
    execute("RESET SESSION AUTHORIZATION")

    # runs of the owner and of a tenant
    execute("CREATE TABLE questions (id integer PRIMARY KEY, question text, documents jsonb)")
    for i in (1, 4, 10):
        execute("INSERT INTO questions VALUES (%s, %s, %s)", (i, text(i), Jsonb([f"{i // 3}.txt"])))
    execute(sql.SQL("GRANT SELECT ON questions TO {}").format(tenant))
    for who in (None, tenant):
        if who:
            execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(who))
        for n in (1, 5):
            options = {**MEASURED, "n_citations": n}
            execute("SELECT ml_rag_evaluate('questions', %s)", (json.dumps({"name": f"top {n}", "options": options}),))
        execute("RESET SESSION AUTHORIZATION")

    # conversations of the same two, without a model
    for who in (None, tenant):
        if who:
            execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(who))
        chat = "SELECT ml_rag_chat(%s, %s) ->> 'conversation_id'"
        (conversation,) = execute(chat, ("copper ladder", json.dumps(CHAT))).fetchone() or ("",)
        execute(chat, ("violin", json.dumps({**CHAT, "conversation_id": conversation})))
        execute("RESET SESSION AUTHORIZATION")

    # what users build upon the extension
    execute(
        "CREATE VIEW nearest AS SELECT s.rank, s.document_name, s.distance FROM ml_rag_search('q',"
        """ '{"vector_store": ["plain"], "query_embedding": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}') AS s"""
    )
    execute("GRANT SELECT ON nearest TO ml_rag_user")


def insert(owner: Connection, name: str, new: list[Any]) -> None:
    from support.stores import insert

    insert(owner, name, new)


def create_roles(owner: Connection, prefix: str = "content") -> dict[str, str]:
    """Roles of the cluster for a database of its own."""
    names = {name: f"{prefix}_{name}" for name in ROLES}
    for name, group in ROLES.items():
        if owner.execute("SELECT to_regrole(%s)", (names[name],)).fetchone() == (None,):
            owner.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(names[name])))
        owner.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(group), sql.Identifier(names[name])))
    return names


def drop_roles(owner: Connection, names: dict[str, str]) -> None:
    """The roles, and what they own in this database."""
    for name in map(sql.Identifier, names.values()):
        owner.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(name))
        owner.execute(sql.SQL("DROP ROLE {}").format(name))


def questions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Question and options of searches that need no model server."""
    embedding = fake_embedding("copper ladder in the meadow")
    near = {"query_embedding": embedding, "n_citations": 8}
    for store in ("docs", "plain", "half", "parted", "recent", "snapshot", "shared", 'Odd schema.we"ird'):
        yield "q", {"vector_store": [store], **near}
    yield "q", near
    yield "q", {"query_embedding": embedding, "preset": "short"}
    yield "q", {**near, "distance_metric": "DOT", "exclude_vector_store": ["half"]}
    yield "q", {**near, "distance_metric": "EUCLIDEAN", "retrieval_options": {"segment_overlap": 1}}
    yield "q", {**near, "retrieval_options": {"percentage_distance": 30}}
    yield "q", {**near, "document_name": ["/srv/7.txt", "/srv/8.txt"]}
    yield "q", {**near, "filters": {"n": {"gte": 2}}, "required_keywords": ["copper"]}
    for query in ("copper ladder", "number1010 glacier", "number16", "violin"):
        yield query, {"keyword_search": True, "semantic_search": False, "n_citations": 10}
        yield query, {"keyword_search": True, **near, "vector_store": ["docs"]}
        yield query, {"keyword_search": True, **near, "hybrid_options": {"fusion": "rrf"}, "vector_store": ["shared"]}


TABLES = {
    "discovered": "SELECT vector_store, embed_model_id, embedding_type, dimensions FROM ml_rag.discover() ORDER BY 1",
    "settings": "SELECT name, value FROM ml_rag.setting WHERE name NOT IN ('model_server', 'track') ORDER BY 1",
    "presets": "SELECT p::text FROM ml_rag.preset AS p ORDER BY 1",
    "keyword indexes": "SELECT store::text, segment, key::text, configuration, k1, b, statistics, secured"
    " FROM ml_rag.keyword_index ORDER BY 1",
    "runs": "SELECT run_id, name, source, questions, options::text, stores, measures::text, counted::text,"
    " errors::text, latency::text, models::text, versions::text, started_at::text FROM ml_rag.evaluation_run"
    " ORDER BY 1",
    "questions of runs": "SELECT q::text FROM ml_rag.evaluation_question AS q ORDER BY run_id, question_id",
    "conversations": "SELECT c::text FROM ml_rag.conversation AS c ORDER BY 1",
    "turns of conversations": "SELECT m::text FROM ml_rag.message AS m ORDER BY 1",
    "comparison": "SELECT c::text FROM (SELECT array_agg(run_id ORDER BY run_id) AS id FROM ml_rag.evaluation_run)"
    " AS r, ml_rag_compare_runs(r.id[1], r.id[2]) AS c WHERE r.id[2] IS NOT NULL ORDER BY 1",
    "view over the extension": "SELECT rank, document_name, distance::text FROM nearest ORDER BY 1",
    "measured anew": "SELECT ml_rag_evaluate('questions', jsonb_build_object('keep', false, 'options', "
    f"'{json.dumps(MEASURED)}'::jsonb)) ->> 'measures'",
    "rows of docs": "SELECT md5(string_agg(d::text, '' ORDER BY document_id, segment_number)) FROM docs AS d",
    "triggers of docs": "SELECT tgname FROM pg_trigger WHERE tgrelid = 'docs'::regclass ORDER BY 1",
}


def answers(owner: Connection, roles: dict[str, str]) -> dict[str, Any]:
    """What the database answers to its owner and to each of ``ROLES``: label -> rows, or the SQLSTATE of the error."""
    found: dict[str, Any] = {}
    for role in (None, *ROLES):
        if role:
            owner.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(roles[role])))
        for label, query in TABLES.items():
            found[f"{role or 'owner'}: {label}"] = ask(owner, query)
        for query, options in questions():
            told = {k: v for k, v in options.items() if k != "query_embedding"}
            found[f"{role or 'owner'}: {query} {json.dumps(told)}"] = ask(
                owner,
                "SELECT rank, vector_store, document_name, document_id, segment_number, segment, distance::text,"
                " metadata::text, keyword_score, score FROM ml_rag_search(%s, %s)",
                query,
                json.dumps(options),
            )
        owner.execute("RESET SESSION AUTHORIZATION")
    return found


def ask(connection: Connection, query: str, *arguments: str) -> Any:
    try:
        return [list(row) for row in connection.execute(query, arguments or None)]
    except psycopg.Error as e:
        return f"{e.sqlstate} {e.diag.message_primary}"


def alike(before: Any, after: Any) -> bool:
    """Equal, but for the last places of a float: numpy adds up otherwise from version to version."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(alike, before, after))
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=1e-12)
    return bool(before == after)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{label}:\n  before: {before.get(label)}\n  after:  {after.get(label)}"
        for label in sorted(before.keys() | after.keys())
        if not alike(before.get(label), after.get(label))
    ]


def main(command: str, dsn: str, path: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as owner:
        if command == "make":
            owner.execute("CREATE EXTENSION IF NOT EXISTS ml_rag CASCADE")
            roles = create_roles(owner)
            make(owner, roles)
            with open(path, "w") as file:
                json.dump(answers(owner, roles), file, indent=1)
            return 0
        with open(path) as file:
            expected = json.load(file)
        # through JSON, so that numbers are alike
        problems = differences(expected, json.loads(json.dumps(answers(owner, create_roles(owner)))))
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
