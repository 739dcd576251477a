"""What plans tell: nothing of stores that a role may not read, nor of rows that row-level security hides.

EXPLAIN shows how many rows each scan had and how many pages it read, and pushes the caller's conditions into views.
So no relation that others may read stands on the tables of the keyword indexes, and what functions of ml_rag read on
the way to an answer is the same whether a hidden row has a word or nobody has.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database
from support.keywords import SCORES, enable, keyword_store
from support.plans import plan
from support.stores import create_store, error, insert

# pages and rows are counted, of tables that nobody has written before, by sessions that have planned nothing
pytestmark = pytest.mark.fresh

KEY = "'segment', '{document_id,segment_number}'"
READABLE = """
SELECT c.relname, array_agg(a.attname ORDER BY a.attnum)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
WHERE c.relnamespace::regnamespace::text ~ '^ml_rag' AND c.relkind IN ('r', 'v')
  AND has_table_privilege(c.oid, 'SELECT')
  AND a.atttypid = ANY ('{text,name,oid,regclass,bigint,integer}'::regtype[])
GROUP BY 1 ORDER BY 1
"""


def test_no_view_that_others_read_stands_on_the_tables_of_an_index(owner: Connection, asker: Connection) -> None:
    standing = owner.execute(
        "SELECT DISTINCT r.ev_class::regclass::text, d.refobjid::regclass::text FROM pg_rewrite AS r"
        " JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid"
        " AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> r.ev_class"
        " WHERE d.refobjid::regclass::text LIKE 'ml_rag.keyword\\_%'"
    ).fetchall()
    assert standing == []
    readable = [name for name, _ in asker.execute(READABLE)]
    assert [name for name in readable if name.startswith("keyword")] == ["keyword_index"]
    with error("42501", ours=False):
        asker.execute("EXPLAIN SELECT 1 FROM ml_rag_internal.keyword_posting WHERE term = 'zanzibar'")


def test_plans_are_the_same_with_and_without_stores_that_one_may_not_read(
    db: Database, owner: Connection, asker: Connection
) -> None:
    """Over every relation of ml_rag that a role may read, with conditions that the planner could push anywhere."""
    keyword_store(owner, ["common words"], "open")
    create_store(owner, "hidden")
    owner.execute("REVOKE ALL ON hidden FROM ml_rag_user")
    asker.execute("SET enable_nestloop = off")
    statements = []
    for name, columns in asker.execute(READABLE).fetchall():
        if name.startswith("evaluation") or name in ("activity", "stats", "progress", "setting_value"):
            continue  # hold nothing of stores
        statements.append(f"SELECT * FROM ml_rag.{name}")
        for column in columns:
            # estimates of both are in that of the statement
            wanted = f"{column}::text >= 'hidden' AND {column}::text IN ('zanzibar', 'hidden')"
            statements.append(f"SELECT 1 FROM ml_rag.{name} WHERE {wanted}")
    owner.execute(SCORES)
    (oid,) = owner.execute("SELECT 'hidden'::regclass::oid").fetchone() or (0,)
    statements += [
        f"SELECT * FROM ml_rag.keyword_index WHERE store = {oid}::oid",
        f"SELECT * FROM ml_rag._keyword_index({oid}::oid)",
        "SELECT * FROM ml_rag.discover()",
        f"SELECT * FROM public.keyword_scores({oid}::oid, {KEY}, '{{zanzibar}}', '{{1}}', 10)",
    ]
    assert len(statements) > 20
    owner.execute("ANALYZE")
    before = [plan(asker, statement) for statement in statements]
    insert(owner, "hidden", [("d", 1, i, "zanzibar quicksilver", (1, i, 0)) for i in range(50)])
    enable(owner, "hidden")
    owner.execute("SELECT ml_rag.merge_keyword_index('hidden')")
    keyword_store(owner, ["zanzibar"] * 3, "hidden_too")
    owner.execute("REVOKE ALL ON hidden_too FROM ml_rag_user; ANALYZE")
    for statement, old in zip(statements, before, strict=True):
        assert plan(asker, statement) == old, statement


@pytest.mark.parametrize("folded", [True, False])
def test_a_word_of_hidden_rows_costs_the_same_pages_as_a_word_of_nobodys(
    db: Database, owner: Connection, folded: bool
) -> None:
    """Where statistics are of the visible rows."""
    create_store(owner)
    enable(owner, options='{"statistics": "visible", "language": "simple"}')
    rows: list[Any] = [("asker.txt", 1, i, f"common w{i}", (1, i, 0)) for i in range(200)]
    rows += [("tenant.txt", 2, i, "common " + "zanzibar " * (1 + i % 5), (1, i, 0)) for i in range(2000)]
    insert(owner, "docs", rows)
    owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY")
    owner.execute(f"CREATE POLICY p ON docs TO {db.role('asker')} USING (document_name = 'asker.txt')")
    if folded:
        owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    asker = db.connect("asker")
    owner.execute(SCORES)
    scores = f"SELECT * FROM public.keyword_scores('docs'::regclass, {KEY}, '{{%s}}', '{{1}}', 10)"
    words = ("zanzibar", "zanzibaz", "absent99")
    for _ in range(3):  # catalogue, plans
        for word in words:
            asker.execute(scores % word)
    # the least: pages of the catalogue are read again when a command of another test made the session forget it
    found = [min(plan(asker, scores % word, pages=True) for _ in range(3)) for word in words]
    assert found[0] == found[1] == found[2], found
    # the measure does see what is read: more words of one's own, more pages
    assert plan(asker, scores % "common", pages=True) > found[0]


@pytest.mark.parametrize("statistics", ["visible", "all"])
def test_what_a_writer_causes_does_not_tell_of_words_that_others_wrote(
    db: Database, owner: Connection, statistics: str
) -> None:
    """A fold writes a posting for each word that waits: whoever caused it sees how many, and may roll back."""
    create_store(owner)
    enable(owner, options=json.dumps({"statistics": statistics, "language": "simple"}))
    if statistics == "visible":  # sees its own rows
        owner.execute("ALTER TABLE docs ENABLE ROW LEVEL SECURITY; GRANT INSERT ON docs TO ml_rag_user")
        owner.execute(f"CREATE POLICY p ON docs TO {db.role('asker')} USING (document_name = 'asker.txt')")
    else:  # may write what it may not read
        owner.execute("REVOKE ALL ON docs FROM ml_rag_user; GRANT INSERT ON docs TO ml_rag_user")
    insert(owner, "docs", [("tenant.txt", 1, i, "zanzibar", (1, i, 0)) for i in range(5)])
    asker = db.connect("asker")

    def written(word: str) -> Any:
        with asker.transaction(force_rollback=True):
            before = asker.execute(WRITTEN).fetchall()
            enough_to_merge(asker, "asker.txt", word)
            return [row[1] - old[1] for row, old in zip(asker.execute(WRITTEN), before, strict=True)]

    assert written("zanzibar") == written("quicksilver") == [0, 0]
    # one who sees all of it folds
    enough_to_merge(owner, "owner.txt", "common")
    assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_new").fetchone() == (0,)


def enough_to_merge(connection: Connection, name: str, word: str) -> None:
    """With the five that wait: not enough for the statement to fold its own rows alone."""
    connection.execute(
        "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment, segment_embedding)"
        " SELECT %s, '{}', 2, i, %s, '[1,0,0]' FROM generate_series(1, 998) AS i",
        (name, word),
    )


WRITTEN = """
SELECT s.relname, s.n_tup_ins FROM pg_stat_xact_all_tables AS s
WHERE s.schemaname = 'ml_rag_internal' AND s.relname IN ('keyword_posting', 'keyword_run') ORDER BY 1
"""


def test_plans_do_not_tell_what_others_have_evaluated(db: Database, owner: Connection, tenant: Connection) -> None:
    """The tables hold the runs of all roles; policies leave each its own."""
    for _ in range(30):
        (run,) = tenant.execute(
            "INSERT INTO ml_rag.evaluation_run (name, started_at, seconds, source, questions, options, stores, models,"
            " versions, measures, counted, latency, errors) VALUES ('zanzibar', now(), 1, 'zanzibar', 1, '{}', '{}',"
            " '{}', '{}', '{}', '{}', '{}', '{}') RETURNING run_id"
        ).fetchone() or (0,)
        tenant.execute(
            "INSERT INTO ml_rag.evaluation_question (run_id, question_id, question, citations, measures, latency)"
            " SELECT %s, w || i, w, '[]', '{}', '{}' FROM generate_series(1, 20) AS i, (VALUES ('zanzibar')) AS v (w)",
            (run,),
        )
    owner.execute("ANALYZE ml_rag.evaluation_run; ANALYZE ml_rag.evaluation_question")
    asker = db.connect("asker")
    asker.execute("SET enable_seqscan = off")
    asked = {
        "evaluation_run": ["name = '{}'", "source = '{}'", "name >= '{}' AND name < '{}zz'", "role = '{}'"],
        "evaluation_question": [
            "question_id = '{}1'", "question = '{}'", f"run_id = {run} AND question_id = '{{}}1'", "answer = '{}'",
            f"run_id = {run} AND question_id >= '{{}}' AND question_id < '{{}}zz'", "md5(question_id) = md5('{}1')",
        ],
    }  # fmt: skip
    for table, conditions in asked.items():
        for condition in conditions:
            statement = f"SELECT 1 FROM ml_rag.{table} WHERE {condition}"
            plans = [
                json.dumps(plan(asker, statement.replace("{}", word))).replace(word, "w")
                for word in ("zanzibar", "quicksilver")
            ]
            assert plans[0] == plans[1].replace("quicksilver", "w").replace(md5("quicksilver1"), md5("zanzibar1")), (
                statement
            )


def test_plans_do_not_tell_what_others_have_said(db: Database, owner: Connection, tenant: Connection) -> None:
    """The turns of all conversations are in one table; policies leave each role its own."""
    for _ in range(20):
        (conversation,) = tenant.execute(
            "INSERT INTO ml_rag.conversation DEFAULT VALUES RETURNING conversation_id"
        ).fetchone() or ("",)
        tenant.execute(
            "INSERT INTO ml_rag.message (message_id, conversation_id, turn, query, question, text, citations, options)"
            " SELECT gen_random_uuid(), %s, i, w, w, w, jsonb_build_array(w), jsonb_build_object('a', w)"
            " FROM generate_series(1000001, 1000020) AS i, (VALUES ('zanzibar')) AS v (w)",
            (conversation,),
        )
    owner.execute("ANALYZE ml_rag.conversation; ANALYZE ml_rag.message")
    asker = db.connect("asker")
    asker.execute("SET enable_seqscan = off")
    nobody = "00000000-0000-4000-8000-000000000000"
    pairs = [
        *[
            (f"SELECT 1 FROM ml_rag.message WHERE {condition}", "zanzibar", "quicksilver")
            for condition in (
                "query = '{}'", "question >= '{}' AND question < '{}zz'", "text LIKE '%{}%'", "role = '{}'",
                "citations ? '{}'", "options ->> 'a' = '{}'", "turn = 1000003 AND query = '{}'",
            )
        ],
        *[
            (f"SELECT 1 FROM ml_rag.{table} WHERE conversation_id = '{{}}'", str(conversation), nobody)
            for table in ("conversation", "message")
        ],
        ("SELECT 1 FROM ml_rag.message WHERE turn = 1000007 AND conversation_id = '{}'", str(conversation), nobody),
        ("UPDATE ml_rag.message SET text = NULL WHERE conversation_id = '{}'", str(conversation), nobody),
        ("SELECT ml_rag.forget_conversation('{}')", str(conversation), nobody),
        ("UPDATE ml_rag.conversation SET changed_at = now() WHERE conversation_id = '{}'", str(conversation), nobody),
        ("SELECT query, filters FROM ml_rag.message WHERE conversation_id = '{}'", str(conversation), nobody),
        ("SELECT 1 FROM ml_rag.message WHERE turn = {}", "1000007", "1999999"),
    ]  # fmt: skip
    for statement, there, absent in pairs:
        plans = [json.dumps(plan(asker, statement.replace("{}", word))).replace(word, "w") for word in (there, absent)]
        assert plans[0] == plans[1], statement
    assert asker.execute("SELECT count(*) FROM ml_rag.message").fetchone() == (0,)


def test_plans_do_not_tell_keys_of_others_rows_that_could_not_be_embedded(
    db: Database, owner: Connection, tenant: Connection
) -> None:
    """A key may be an address. Conditions on relation and key are leakproof: they are looked up before a policy."""
    owner.execute(sql.SQL("CREATE SCHEMA t AUTHORIZATION {}").format(sql.Identifier(db.role("tenant"))))
    tenant.execute("CREATE TABLE t.items (id text PRIMARY KEY)")
    tenant.execute("CREATE TRIGGER v AFTER INSERT ON t.items EXECUTE FUNCTION ml_rag._wake_workers('{}')")
    failure = '{"sqlstate": "38000", "message": "zanzibar"}'
    tenant.execute(
        "SELECT ml_rag._note_failures('t.items', ARRAY['{zanzibar}'], ARRAY['text'], ARRAY[%s::jsonb])", (failure,)
    )
    assert tenant.execute("SELECT key FROM ml_rag.vectorizer_error").fetchall() == [("{zanzibar}",)]
    owner.execute("ANALYZE ml_rag.vectorizer_error")
    (relation,) = owner.execute("SELECT 't.items'::regclass::oid").fetchone() or (0,)
    asker = db.connect("asker")
    asker.execute("SET enable_seqscan = off")
    for bitmaps in ("on", "off"):
        asker.execute(f"SET enable_bitmapscan = {bitmaps}")
        for condition in (
            "relation = REL", "relation = REL AND key = 'KEY'", "key >= 'KEY' AND message = 'KEY'",
            "relation = REL AND key >= 'KEY' AND key < 'KEYz'", "key = 'KEY' OR relation = 1",
            "relation = REL AND (key = 'KEY' OR key = 'x')", "(relation, key) >= (REL::oid, 'KEY')",
            "key = ANY ('{\"KEY\"}') AND relation = ANY ('{REL,1}')",
        ):  # fmt: skip
            statement = f"SELECT 1 FROM ml_rag.vectorizer_error WHERE {condition}"
            # another key, or another table where only that is asked for
            plans = [
                json.dumps(plan(asker, of_key.replace("REL", str(table))))
                .replace(key, "KEY")
                .replace(f"'{table}'::oid", "REL")
                for key, table in (("{zanzibar}", relation), ("{nobodys}", relation if "KEY" in condition else 1))
                for of_key in [statement.replace("KEY", key)]
            ]
            assert plans[0] == plans[1], condition
            assert '"Rows Removed by Filter": 1' not in plans[0], condition


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def test_no_estimates_for_the_words_that_are_asked_for_are_shown(db: Database, owner: Connection) -> None:
    """debug_print_plan is anybody's to set: estimates for a word would tell how common it is."""
    keyword_store(owner, ["zanzibar"] * 300 + ["quicksilver"])
    owner.execute("SELECT ml_rag.merge_keyword_index('docs'); ANALYZE")
    owner.execute(SCORES)
    asker = db.connect("asker")
    told: list[str] = []
    asker.add_notice_handler(lambda d: told.append(str(d.message_detail)))
    asker.execute("SET client_min_messages = log; SET debug_print_plan = on")
    asker.execute(f"SELECT * FROM public.keyword_scores('docs'::regclass, {KEY}, '{{zanzibar}}', '{{1}}', 10)")
    assert any("keyword_scores" in text for text in told)
    assert not any("keyword_posting" in text for text in told)
