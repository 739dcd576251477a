"""strings, vectorizer/segments, vectorizer/immediate, keyword/index: settings change nothing of what is done."""

from __future__ import annotations

import re

import pytest
from psycopg.types.json import Jsonb

from support.cluster import Connection, Database
from support.keywords import assert_exact
from support.models_server import ModelsServer
from support.stores import create_store, error, fake_embedding, insert
from support.vectorizers import ITEMS, assert_segments_in_step, create, run

#: that any role may change
SETTINGS = [
    "quote_all_identifiers = on", "standard_conforming_strings = off", "transform_null_equals = on",
    "array_nulls = off", "search_path = ''", "default_transaction_isolation = 'serializable'",
    "DateStyle = 'German, DMY'", "IntervalStyle = sql_standard", "TimeZone = 'Pacific/Apia'", "bytea_output = escape",
    "extra_float_digits = -15", "client_encoding = LATIN1", "backslash_quote = off", "xmloption = document",
    "work_mem = '64kB'", "plan_cache_mode = force_custom_plan", "jit = on; SET jit_above_cost = 0",
    "enable_indexscan = off; SET enable_bitmapscan = off", "enable_seqscan = off; SET enable_sort = off",
    "lc_numeric = 'C'; SET lc_monetary = 'C'; SET lc_time = 'C'", "default_text_search_config = 'simple'",
    "check_function_bodies = off", "default_table_access_method = heap", "constraint_exclusion = on",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["queued", "immediate"])
def test_segments_follow(db: Database, owner: Connection, models: ModelsServer, mode: str) -> None:
    owner.execute(ITEMS)
    create(owner, columns="{notes}", destination="table", **({"mode": mode} if mode == "immediate" else {}))
    owner.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON items TO ml_rag_user")
    tenant = db.connect("tenant")
    for i, setting in enumerate(SETTINGS):
        n = 10 * i
        tenant.execute(f"RESET ALL; SET {setting}")
        tenant.execute(
            f"INSERT INTO public.items SELECT {n} + j, 'n' || j, 'text ' || {n} + j FROM generate_series(1, 5) AS j;"
            f"UPDATE public.items SET notes = 'it''s other ' || id WHERE id = {n} + 1;"
            f"UPDATE public.items SET id = id + 5 WHERE id = {n} + 2; DELETE FROM public.items WHERE id = {n} + 3"
        )
        assert owner.execute("SELECT count(DISTINCT source_id) FROM items_segments").fetchone() == (4 * (i + 1),), (
            setting
        )
    run(owner)
    assert_segments_in_step(owner, "items")


def test_keyword_indexes_follow(db: Database, owner: Connection) -> None:
    create_store(owner)
    insert(owner, "docs", [(f"d{i}", i, 1, f"word{i} maple", (1, i, 0)) for i in range(5)])
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    owner.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON docs TO ml_rag_user")
    tenant = db.connect("tenant")
    for i, setting in enumerate(SETTINGS):
        n = 100 + 10 * i
        tenant.execute(f"RESET ALL; SET {setting}")
        tenant.execute(
            "INSERT INTO public.docs (document_name, document_id, segment_number, segment, segment_embedding, metadata)"
            f" SELECT 'd' || ({n} + j), {n} + j, 1, 'it''s maple birch ' || j, d.segment_embedding, '{{}}'"
            " FROM generate_series(1, 4) AS j, (SELECT e.segment_embedding FROM public.docs AS e LIMIT 1) AS d;"
            f"UPDATE public.docs SET segment = 'oak \\ maple' WHERE document_id = {n} + 1;"
            f"DELETE FROM public.docs WHERE document_id = {n} + 2"
        )
    for query in ("maple", "birch", "oak maple"):
        assert_exact(owner, query)


def test_backslashes_of_functions_are_backslashes(db: Database, owner: Connection) -> None:
    """A session reads the strings of a function once, by its setting of the first call."""
    owner.execute("CREATE TABLE items (id integer PRIMARY KEY, name text); GRANT INSERT ON items TO ml_rag_user")
    owner.execute('SELECT ml_rag.create_vectorizer(\'items\', \'{"columns": "name", "mode": "immediate"}\')')
    connection = db.connect("tenant", options="-c standard_conforming_strings=off")
    connection.execute("INSERT INTO items VALUES (1, 'lamp')")
    assert owner.execute("SELECT segment_embedding IS NOT NULL FROM items").fetchone() == (True,)
    connection = db.connect("tenant", options="-c standard_conforming_strings=off")
    connection.execute("CREATE TEMP VIEW one AS SELECT 1 AS it; CREATE TEMP VIEW slow AS SELECT pg_sleep(1) IS NULL")
    check = "SELECT ml_rag._refusal(ml_rag._parsed(v), ARRAY[v::regclass::oid]) FROM (SELECT %s::text) AS v (v)"
    assert connection.execute(check, ["one"]).fetchone() == (None,)
    assert "it calls pg_sleep" in str(connection.execute(check, ["slow"]).fetchone())
    for model in ("all_minilm_l6_v2", "a-v.b"):
        marked = connection.execute("SELECT ml_rag._marked_model('GENAI_OPTIONS=EMBED_MODEL_ID=' || %s)", [model])
        assert marked.fetchone() == (model,)


def test_types_of_columns_and_functions_are_known(owner: Connection) -> None:
    create_store(owner, "docs", [("a", 1, 1, "heron", fake_embedding("heron"))], type="vector(16)")
    owner.execute(
        "CREATE FUNCTION score(query text, segment text) RETURNS float8 IMMUTABLE RETURN 0.5;"
        "CREATE TABLE texts (id int PRIMARY KEY, q text, answer jsonb, details text, v vector(16));"
        "INSERT INTO texts VALUES (1, 'heron')"
    )
    arms = {"vector_store": ["public.docs"], "arms": [{"search": "function", "function": "public.score"}]}
    for setting in SETTINGS:
        owner.execute(f"RESET ALL; SET {setting}")
        owner.execute("SELECT ml_rag.create_store('public.docs')")
        assert owner.execute("SELECT FROM public.ml_rag_search('heron', %s)", [Jsonb(arms)]).rowcount == 1, setting
        details = Jsonb({"details_column": "details"})
        owner.execute("CALL public.ml_embed_table('public.texts.q', 'public.texts.v', %s)", [details])
        owner.execute("CALL public.ml_generate_table('public.texts.q', 'public.texts.answer')")
        written = owner.execute("SELECT FROM public.texts WHERE v IS NOT NULL AND answer IS NOT NULL")
        assert written.rowcount == 1, setting
        owner.execute("UPDATE public.texts SET v = NULL, answer = NULL")
    owner.execute("SET quote_all_identifiers = on")
    owner.execute("CALL ml_rag.add_embedding('public.docs', 'other', %s)", [Jsonb({"embed_model_id": "fake-embed"})])


def test_what_one_role_sets_changes_no_pattern_for_the_next(db: Database, owner: Connection) -> None:
    """In a session that serves several, as a pool's does: each function reads its strings at the first call of it."""
    create_store(owner)
    texts = ["back\\slash", "our sales", "two words"]
    insert(owner, "docs", [(f"d{i}", i, 1, text, (1, i, 0)) for i, text in enumerate(texts)])
    connection = db.connect("tenant", options="-c standard_conforming_strings=off")

    def found(**options: object) -> list[str]:
        wanted = {"query_embedding": [1, 0, 0], "n_citations": 9, **options}
        rows = connection.execute("SELECT segment FROM ml_rag_search('?', %s)", [Jsonb(wanted)]).fetchall()
        return sorted(row[0] for row in rows)

    for setting in ("off", "on"):
        connection.execute(f"SET standard_conforming_strings = {setting}")
        for text in (*texts, "sales", "slash"):
            assert found(required_keywords=[text]) == [one for one in texts if text in one]
            assert found(excluded_keywords=[text]) == [one for one in texts if text not in one]
        with error("22023", "does not end within an escape"):
            found(filters={"/n": {"like": "a\\"}})
        with error("P0002"):
            found(filters={"/n": {"like": "a*"}})


def test_no_function_reads_a_backslash_by_the_setting(owner: Connection) -> None:
    """Procedures that commit cannot have a setting: these have no such string."""
    found = owner.execute(
        "SELECT p.oid::regprocedure::text, p.prosrc FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang"
        " WHERE p.pronamespace IN (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname LIKE 'ml_rag%')"
        " AND l.lanname IN ('plpgsql', 'sql')"
        " AND NOT coalesce('standard_conforming_strings=on' = ANY (p.proconfig), false)"
    ).fetchall()
    assert [name for name, source in found if "\\" in re.sub(r"\bE'(?:[^'\\]|\\.)*'", "", source)] == []
