"""store/policy: a condition of the reader's is evaluated for no row that a policy of ml_rag hides.

Comparisons of texts are leakproof: PostgreSQL evaluates them before a policy that costs more, and EXPLAIN tells of it,
by a subplan of the policy that was executed or by the pages of a long text that was read.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.loading import loader_role
from support.nodes import create
from support.plans import plan
from support.stores import create_store, error, fake_embedding, insert, search

#: w: what is looked for. The long ones are pages of their own.
CONDITIONS = [
    "{c} = {w}", "{c} >= {w} AND {c} <= {w}", "{c} IN ({w}, {w})", "{c} IS NOT DISTINCT FROM {w}",
    "({c} = {w}) IS TRUE",
    "{c} >= {w} AND {c} <= {w} AND {long} > ''",
]  # fmt: skip
#: j: an object with what is looked for as its key. A subscript costs nothing, less than any function
FREE = [
    "(jsonb {j})[m.{col}] IS NOT NULL AND ('{{}}'::jsonb)[m.{long}] IS NULL",
    "((jsonb {j})[m.{col}] IS NULL) IS FALSE",
]
#: statements about a table t and its column col; c: one of the conditions
STATEMENTS = [
    "SELECT 1 FROM {t} AS m TABLESAMPLE SYSTEM (100) WHERE {c}",
    "WITH x AS NOT MATERIALIZED (SELECT * FROM {t}) SELECT 1 FROM x AS m WHERE {c}",
    "SELECT 1 FROM {t} AS m JOIN (VALUES ({w}::text), ('a')) AS v (x) ON m.{col} = v.x",
    "SELECT 1 FROM (VALUES ({w}::text), ('a')) AS v (x) LEFT JOIN {t} AS m ON m.{col} = v.x",
    "SELECT 1 FROM (VALUES ({w}::text)) AS v (x) WHERE NOT EXISTS (SELECT FROM {t} AS m WHERE m.{col} = v.x)",
    "SELECT 1 FROM {t} AS m JOIN {t} AS n USING ({col}) WHERE {c}",
    "SELECT count(*) FROM {t} AS m WHERE {c} GROUP BY {col} HAVING {col} = {w}",
    "SELECT * FROM (SELECT {col}, {long}, row_number() OVER (PARTITION BY {col}) FROM {t}) AS m WHERE {c}",
    "UPDATE {t} AS m SET created_at = now() WHERE {c}",
    "SELECT 1 FROM {t} AS m WHERE {c} FOR UPDATE",
]
#: what the reader sets: the path, and what the costs of conditions are multiplied by
SETTINGS = [
    "enable_seqscan = off", "enable_indexscan = off", "enable_bitmapscan = off",
    "cpu_operator_cost = 0", "cpu_operator_cost = 1e-300", "cpu_operator_cost = 1.7e308",
]  # fmt: skip


def told_apart(asker: Connection, statements: dict[str, str]) -> bool:
    """Whether plans or pages that were read tell one word, the key, from another.

    Pages of the catalogue are read again when a command of another test made a session forget it: by chance only.
    """
    for _ in range(3):
        shown = []
        for word, statement in statements.items():
            plan(asker, statement)  # the catalogue is read
            shown.append((str(plan(asker, statement)).replace(word, "…"), plan(asker, statement, pages=True)))
        if shown[0] == shown[1]:
            return False
    return True


def same(
    asker: Connection, relation: str, column: str, long: str, hidden: str, absent: str, *, free: bool = True
) -> None:
    """Whatever the path: what a hidden row has and what nobody has take the same."""
    for setting in SETTINGS:
        asker.execute(f"RESET ALL; SET jit = off; SET {setting}")
        for condition in CONDITIONS + FREE if free else CONDITIONS:
            statements = {}
            for word in (hidden, absent):
                where = condition.format(
                    c=column,
                    col=column,
                    long=long,
                    w=sql.Literal(word).as_string(asker),
                    j=sql.Literal(json.dumps({word: 1})).as_string(asker),
                )
                statements[word] = f"SELECT 1 FROM {relation} AS m WHERE {where}"
            assert not told_apart(asker, statements), (setting, condition)


def secrets(n: int) -> list[str]:
    return [f"Bob earns {i}." for i in range(n)]


@pytest.mark.parametrize("parent", ["segment", "document"])
def test_of_nodes(db: Database, owner: Connection, parent: str) -> None:
    create_store(owner)
    rows: list[Any] = [("asker.txt", 1, i, f"Mine {i}.", (1, i, 0)) for i in range(3)]
    rows += [(f"tenant{i}.txt", 2 + i, 1, text, (1, i, 0)) for i, text in enumerate(secrets(60))]
    insert(owner, "docs", rows)
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute(f"CREATE POLICY p ON docs TO {db.role('asker')} USING (document_name = 'asker.txt')")
    create(owner, "sentences", transform="sentence", parent=parent)
    (text_hash,) = owner.execute("SELECT text_hash FROM docs_sentences WHERE document_id = 9 LIMIT 1").fetchone() or (
        0,
    )
    owner.execute("VACUUM ANALYZE docs, docs_sentences")
    asker = db.connect("asker")
    # as with any table whose policy needs a function: docs/security.md
    same(asker, "docs_sentences", "node", "node", "Bob earns 7.", "Bob earns x.", free=False)
    same(asker, "docs_sentences", "text_hash::bigint", "node", str(text_hash), "12345", free=False)
    assert (
        asker.execute("SELECT count(*) FROM docs_sentences WHERE node LIKE 'Mine%'").fetchone() == (3,)
        if (parent == "segment")
        else (1,)
    )
    assert asker.execute("SELECT count(*) FROM docs_sentences WHERE node LIKE 'Bob%'").fetchone() == (0,)


def test_of_the_segments_of_a_vectorizer(db: Database, owner: Connection) -> None:
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, who text, note text)")
    for i, text in enumerate(["Mine.", *secrets(60)]):
        owner.execute("INSERT INTO items VALUES (%s, %s, %s)", (i, "bob" if i else "asker", text))
    owner.execute("GRANT SELECT ON items TO ml_rag_user; ALTER TABLE items ENABLE ROW LEVEL SECURITY")
    owner.execute("CREATE POLICY p ON items USING (who = 'asker')")
    options = '{"columns": "note", "destination": "table", "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    owner.execute("CALL ml_rag.run_vectorizer('items')")
    owner.execute("VACUUM ANALYZE items, items_segments")
    asker = db.connect("asker")
    same(asker, "items_segments", "segment", "segment", "Bob earns 7.", "Bob earns x.", free=False)
    assert asker.execute("SELECT segment FROM items_segments").fetchall() == [("Mine.",)]
    found = search(asker, "Bob earns 7.", {"vector_store": ["public.items_segments"]})
    assert len(found) == 1


def test_the_function_follows_renames_and_goes_with_what_it_is_for(db: Database, owner: Connection) -> None:
    made = "SELECT proname FROM pg_proc WHERE proname ~ '_\\d+_visible$'"
    create_store(owner, rows=[("a", 1, 1, "One.", (1, 0, 0))])
    create(owner, "sentences", transform="sentence")
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, note text); INSERT INTO items VALUES (1, 'One.')")
    options = '{"columns": "note", "destination": "table", "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s); ", (options,))
    owner.execute("GRANT SELECT ON items, items_segments TO ml_rag_user")
    assert len(owner.execute(made).fetchall()) == 2
    owner.execute("ALTER TABLE docs RENAME TO papers; ALTER TABLE items RENAME TO things")
    owner.execute("INSERT INTO things VALUES (2, 'Two.')")
    asker = db.connect("asker")
    assert asker.execute("SELECT node FROM docs_sentences WHERE node_number > 0").fetchall() == [("One.",)]
    assert asker.execute("SELECT segment FROM items_segments ORDER BY 1").fetchall() == [("One.",), ("Two.",)]
    owner.execute("SELECT ml_rag.drop_vectorizer('things')")
    owner.execute("SELECT ml_rag.drop_node_group('papers', 'sentences')")
    assert owner.execute(made).fetchall() == []
    create(owner, "sentences", "papers", transform="sentence")
    owner.execute("DROP TABLE papers CASCADE")
    assert owner.execute(made).fetchall() == []


def test_a_function_goes_with_a_table_that_is_dropped_by_itself(db: Database, owner: Connection) -> None:
    made = "SELECT proname FROM pg_proc WHERE proname ~ '[0-9]_visible$'"
    create_store(owner, rows=[("a", 1, 1, "One.", (1, 0, 0))])
    create(owner, "sentences", transform="sentence")
    (oid,) = owner.execute("SELECT 'docs_sentences'::regclass::oid").fetchone() or (0,)
    # of the same name, but not made by ml_rag
    owner.execute(f"CREATE FUNCTION mine_{oid}_visible() RETURNS boolean LANGUAGE sql RETURN true")
    owner.execute("DROP TABLE docs_sentences")
    assert owner.execute(made).fetchall() == [(f"mine_{oid}_visible",)]


def test_a_former_owner_keeps_no_code_in_what_is_searched_unasked(
    db: Database, owner: Connection, loader: Connection
) -> None:
    """ALTER TABLE … OWNER TO leaves the function of the policy behind, and whoever owns that can replace it."""
    former = f'"{loader_role(db)}"'
    owner.execute(f"REVOKE ml_rag_publisher FROM {former}; GRANT CREATE ON SCHEMA public TO {former}".encode())
    create_store(owner, rows=[("a", 1, 1, "Herons wait.", fake_embedding("Herons wait."))], type="vector(16)")
    owner.execute(f"ALTER TABLE docs OWNER TO {former}".encode())
    create(loader, "sentences", transform="sentence")
    loader.execute("CREATE TABLE items (id integer PRIMARY KEY, note text); INSERT INTO items VALUES (1, 'Grebes.')")
    options = '{"columns": "note", "destination": "table", "embed_model_id": "fake-embed"}'
    loader.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    loader.execute("CALL ml_rag.run_vectorizer('items')")
    loader.execute("CREATE TABLE ran (by name); GRANT INSERT ON ran TO PUBLIC")
    for table in ("docs", "docs_sentences", "items", "items_segments"):
        owner.execute(f"ALTER TABLE {table} OWNER TO CURRENT_USER; GRANT SELECT ON {table} TO ml_rag_user".encode())
    made = "SELECT p.oid::regproc, pg_get_function_identity_arguments(p.oid) FROM pg_proc AS p WHERE p.proowner = %s"
    functions = owner.execute(made + "::regrole AND p.proname ~ '_visible$'", (former,)).fetchall()
    assert len(functions) == 2
    for name, arguments in functions:
        loader.execute(
            f"CREATE OR REPLACE FUNCTION {name}({arguments}) RETURNS boolean LANGUAGE sql AS"
            " 'INSERT INTO public.ran VALUES (current_user) RETURNING true'".encode()
        )
        loader.execute(f"ALTER FUNCTION {name}({arguments}) VOLATILE".encode())
    asker = db.connect("asker")
    assert [row[1] for row in search(asker, "herons", {"n_citations": 10})] == ["public.docs"]
    with error("55000", "no vector store has a node group"):
        search(asker, "herons", {"arms": [{"search": "semantic", "in": "sentences"}]})
    assert owner.execute("SELECT count(*) FROM ran").fetchone() == (0,)
    # given away with the functions, as REASSIGN OWNED does
    for name, arguments in functions:
        owner.execute(f"ALTER FUNCTION {name}({arguments}) OWNER TO CURRENT_USER".encode())
    assert len(search(asker, "herons", {"n_citations": 10})) == 2


def test_functions_of_the_same_name_are_in_nobodys_way(db: Database, owner: Connection) -> None:
    """Numbers of tables can be guessed by who may create functions beside them."""
    create_store(owner, rows=[("a", 1, 1, "One.", (1, 0, 0))])
    owner.execute("CREATE TABLE probe (); GRANT CREATE ON SCHEMA public TO PUBLIC")
    (oid,) = owner.execute("SELECT 'probe'::regclass::oid::integer").fetchone() or (0,)
    asker = db.connect("asker")
    for guessed in range(oid, oid + 100):
        asker.execute(f"CREATE FUNCTION docs_sentences_{guessed}_visible() RETURNS boolean LANGUAGE sql RETURN true")
    create(owner, "sentences", transform="sentence")
    assert asker.execute("SELECT count(*) FROM docs_sentences").fetchone() == (2,)


def talk(owner: Connection, tenant: Connection) -> None:
    """A conversation of the tenant's, of long texts."""
    long = "(SELECT string_agg(md5(j::text || i), '') FROM generate_series(1, 1000) AS j)"
    tenant.execute("INSERT INTO ml_rag.conversation DEFAULT VALUES")
    tenant.execute(
        "INSERT INTO ml_rag.message (message_id, conversation_id, turn, query, question, text, citations, options)"
        f" SELECT gen_random_uuid(), c.conversation_id, i, 'Bob earns ' || i, 'q' || i, {long}, '[]', '{{}}'"
        " FROM ml_rag.conversation AS c, generate_series(1, 20) AS i"
    )
    owner.execute("VACUUM ANALYZE ml_rag.conversation, ml_rag.message")


def test_of_conversations(db: Database, owner: Connection, tenant: Connection) -> None:
    talk(owner, tenant)
    asker = db.connect("asker")
    same(asker, "ml_rag.message", "query", "text", "Bob earns 7", "Bob earns x")
    assert tenant.execute("SELECT count(*) FROM ml_rag.message WHERE query = 'Bob earns 7'").fetchone() == (1,)


@pytest.mark.parametrize(
    "setting",
    [
        "jit = off",
        "force_parallel_mode = on",
        "cpu_operator_cost = 0",
        "enable_hashjoin = off; SET enable_mergejoin = off",
        "enable_hashjoin = off; SET enable_nestloop = off",
    ],
)
def test_of_conversations_by_other_statements(
    db: Database, owner: Connection, tenant: Connection, setting: str
) -> None:
    if setting.startswith("force_parallel_mode") and owner.info.server_version >= 160000:
        setting = "debug_parallel_query = on"
    talk(owner, tenant)
    asker = db.connect("asker")
    asker.execute(f"SET jit = off; SET {setting}")
    # in a UNION ALL, a subscript comes before the policy: docs/security.md
    statements = [(s, c) for s in STATEMENTS for c in ("m.{col} = {w} AND m.{long} > ''", *FREE)]
    for statement, condition in [
        *statements,
        (
            "SELECT 1 FROM (SELECT * FROM {t} UNION ALL SELECT * FROM {t}) AS m WHERE {c}",
            "m.{col} = {w} AND m.{long} > ''",
        ),
    ]:
        asked = {}
        for word in ("Bob earns 7", "Bob earns x"):
            names = {"t": "ml_rag.message", "col": "query", "long": "text", "w": f"'{word}'"}
            where = condition.format(**names, j=sql.Literal(json.dumps({word: 1})).as_string(asker))
            asked[word] = statement.format(**names, c=where)
        assert not told_apart(asker, asked), (statement, condition)


def test_of_evaluations(db: Database, owner: Connection, tenant: Connection) -> None:
    long = "(SELECT string_agg(md5(j::text || i), '') FROM generate_series(1, 1000) AS j)"
    tenant.execute(
        "INSERT INTO ml_rag.evaluation_run (name, started_at, seconds, source, questions, options, stores, models,"
        " versions, measures, counted, latency, errors) SELECT 'Bob earns 7', now(), 1,"
        f" {long}, 1, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}' FROM (VALUES (1)) AS v (i)"
    )
    tenant.execute(
        "INSERT INTO ml_rag.evaluation_question (run_id, question_id, question, answer, citations, measures, latency)"
        f" SELECT r.run_id, i, 'Bob earns ' || i, {long}, '[]', '{{}}', '{{}}'"
        " FROM ml_rag.evaluation_run AS r, generate_series(1, 20) AS i"
    )
    owner.execute("VACUUM ANALYZE ml_rag.evaluation_run, ml_rag.evaluation_question")
    asker = db.connect("asker")
    same(asker, "ml_rag.evaluation_question", "question", "answer", "Bob earns 7", "Bob earns x")
    same(asker, "ml_rag.evaluation_run", "name", "source", "Bob earns 7", "Bob earns x")


def test_of_rows_that_could_not_be_embedded(db: Database, owner: Connection, tenant: Connection) -> None:
    owner.execute(sql.SQL("CREATE SCHEMA t AUTHORIZATION {}").format(sql.Identifier(db.role("tenant"))))
    tenant.execute("CREATE TABLE t.items (id text PRIMARY KEY)")
    tenant.execute("CREATE TRIGGER v AFTER INSERT ON t.items EXECUTE FUNCTION ml_rag._wake_workers('{}')")
    tenant.execute(
        "SELECT ml_rag._note_failures('t.items', ARRAY['{7}'], ARRAY['text'],"
        ' ARRAY[\'{"sqlstate": "38000", "message": "Bob earns 7"}\'::jsonb])'
    )
    owner.execute("VACUUM ANALYZE ml_rag.vectorizer_error")
    asker = db.connect("asker")
    same(asker, "ml_rag.vectorizer_error", "message", "detail", "Bob earns 7", "Bob earns x")
    same(asker, "ml_rag.vectorizer_error", "key", "message", "{7}", "{x}")


def test_of_a_store_whose_policy_is_a_subscript(db: Database, owner: Connection) -> None:
    """As docs/security.md recommends it."""
    long = "".join(f"{i:x}" for i in range(4000))
    create_store(owner, rows=[(f"{long}{i}", i, 1, text, (1, i, 0)) for i, text in enumerate(["Mine.", *secrets(60)])])
    owner.execute(
        "ALTER TABLE docs ADD tenant text COLLATE \"C\" NOT NULL DEFAULT 'bob', ENABLE ROW LEVEL SECURITY;"
        " CREATE POLICY tenant ON docs USING"
        " ((SELECT jsonb_build_object(current_user, true))[tenant] IS NOT NULL AND tenant = current_user)"
    )
    owner.execute("UPDATE docs SET tenant = %s WHERE document_id = 0", (db.role("asker"),))
    owner.execute("VACUUM ANALYZE docs")
    asker = db.connect("asker")
    same(asker, "docs", "segment", "document_name", "Bob earns 7.", "Bob earns x.")
    assert asker.execute("SELECT segment FROM docs").fetchall() == [("Mine.",)]


@pytest.mark.parametrize("relation", ["docs_sentences", "items_segments", "papers"])
def test_estimates_come_from_no_text(owner: Connection, relation: str) -> None:
    """A column of many equal texts would be in the statistics, and each role sees estimates."""
    create_store(owner, rows=[("a", i, 1, "Bob is ill.", (1, 0, 0)) for i in range(200)])
    create(owner, "sentences", transform="sentence")
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, note text)")
    owner.execute("INSERT INTO items SELECT i, 'Bob is ill.' FROM generate_series(1, 200) AS i")
    options = '{"columns": "note", "destination": "table", "embed_model_id": "fake-embed"}'
    owner.execute("SELECT ml_rag.create_vectorizer('items', %s)", (options,))
    owner.execute("SELECT ml_rag.create_store('public.papers')")
    owner.execute(
        "INSERT INTO papers SELECT 'a', '{}', i, 1, 'Bob is ill.', array_fill(1, '{16}')::vector"
        " FROM generate_series(1, 200) AS i"
    )
    owner.execute("ANALYZE")
    column = "node" if relation == "docs_sentences" else "segment"
    rows = [
        owner.execute(f"EXPLAIN (FORMAT JSON) SELECT FROM {relation} WHERE {column} = '{text}'").fetchone()
        for text in ("Bob is ill.", "x")
    ]
    assert str(rows[0]).replace("Bob is ill.", "x") == str(rows[1])
