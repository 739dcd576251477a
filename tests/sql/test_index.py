"""keyword/index: keyword indexes follow their tables, in every way a table can change; they are merged meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time

import psycopg
import pytest

from support.cluster import Connection, Database
from support.keywords import add, assert_exact, assert_scores, enable, found, keyword_store, runs, search, waiting
from support.stores import COLUMNS, error, mark

WORDS = [f"word{i}" for i in range(30)]


# -- every way to change a table --------------------------------------------------------------------------------------


def test_inserts_updates_and_deletes_show_at_once(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog", "cat"])
    add(owner, ["fox cub"], 4)
    assert found(owner) == [1, 4]
    owner.execute("UPDATE docs SET segment = 'fox and dog' WHERE document_id = 2")
    assert found(owner) == [1, 2, 4]
    owner.execute("UPDATE docs SET segment = 'bird' WHERE document_id = 1")
    assert found(owner) == [2, 4]
    owner.execute("DELETE FROM docs WHERE document_id = 4")
    assert found(owner) == [2]
    owner.execute("UPDATE docs SET document_id = 20 WHERE document_id = 2")
    assert found(owner) == [20]
    owner.execute("UPDATE docs SET segment = NULL WHERE document_id = 20")
    assert found(owner) == []
    owner.execute("UPDATE docs SET segment = 'fox' WHERE document_id = 20")
    assert found(owner) == [20]
    assert_exact(owner, "fox dog cat bird")


AGAIN = (
    "CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {}; RETURN NULL; END$$;"
    "CREATE TRIGGER again AFTER {} ON docs FOR EACH {} WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION again()"
)
MORE = "UPDATE public.docs SET segment = segment || ' cub' WHERE segment ~ '^fox'"
BACK = "UPDATE public.docs SET segment = 'cat' WHERE segment = 'fox'"
NEXT = "UPDATE public.docs SET document_id = document_id + 50"
INSERT = "INSERT INTO docs (document_name, metadata, document_id, segment_number, segment)"
MANY = f"{INSERT} SELECT 'd', '{{}}', i, 1, 'fox' FROM generate_series(9, 1500) AS i"


@pytest.mark.parametrize("statistics", ["all", "visible"])
@pytest.mark.parametrize("level", ["ROW", "STATEMENT"])
@pytest.mark.parametrize(
    ("event", "then", "change"),
    [
        ("INSERT", MORE, f"{INSERT} VALUES ('d', '{{}}', 9, 1, 'fox'), ('d', '{{}}', 10, 1, 'owl')"),
        ("INSERT", "UPDATE public.docs SET segment = 'fox cub' WHERE document_id > 1490 AND segment = 'fox'", MANY),
        ("INSERT", f"{MORE}; {NEXT}", f"{INSERT} VALUES ('d', '{{}}', 9, 1, 'fox')"),
        ("INSERT", "DELETE FROM public.docs WHERE segment = 'fox'", f"{INSERT} VALUES ('d', '{{}}', 9, 1, 'fox')"),
        ("UPDATE", MORE, "UPDATE docs SET segment = 'fox' WHERE document_id < 3"),
        ("UPDATE", f"{MORE}; {MORE}", "UPDATE docs SET segment = 'fox' WHERE document_id < 3"),
        ("UPDATE", BACK, "UPDATE docs SET segment = 'fox' WHERE segment = 'cat'"),
        ("UPDATE", f"{MORE}; {NEXT}", "UPDATE docs SET segment = 'fox', document_id = -document_id"),
        ("UPDATE", "DELETE FROM public.docs WHERE document_id = 1", "UPDATE docs SET segment = 'fox'"),
        (
            "DELETE", INSERT.replace("docs", "public.docs") + " VALUES ('d', '{}', 1, 1, 'fox') ON CONFLICT DO NOTHING",
            "DELETE FROM docs WHERE document_id < 3",
        ),
    ],
)  # fmt: skip
def test_what_a_trigger_of_the_table_does_to_a_row_again_shows(
    owner: Connection, statistics: str, level: str, event: str, then: str, change: str
) -> None:
    """The triggers of its statement have run before those of the first one."""
    keyword_store(owner, ["cat", "dog and cat", "cat", "bird", None])
    enable(owner, "docs", json.dumps({"statistics": statistics}))
    owner.execute(AGAIN.format(then, event, level))
    owner.execute(change)
    assert_scores(owner, "fox dog cat bird owl cub")
    assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_owed").fetchone() == (0,)
    owner.execute("DROP TRIGGER again ON docs")
    owner.execute("UPDATE docs SET segment = 'fox' WHERE document_id <> 4")
    assert_scores(owner, "fox dog cat bird owl cub")


def test_a_publication_of_all_tables_fails_no_write(owner: Connection) -> None:
    keyword_store(owner, ["cat", "dog and cat"])
    owner.execute("CREATE PUBLICATION p FOR ALL TABLES")
    owner.execute(AGAIN.format(MORE, "UPDATE", "ROW"))
    owner.execute("UPDATE docs SET segment = 'fox'")
    assert_scores(owner, "fox dog cat cub")


@pytest.mark.parametrize("level", ["ROW", "STATEMENT"])
@pytest.mark.parametrize("change", ["UPDATE docs SET segment = 'fox' WHERE document_id < 3", MANY.replace("1500", "9")])
@pytest.mark.parametrize("texts", [("dog", "fox", "elk"), ("fox", "cat", "dog")])
def test_what_triggers_do_after_each_other_to_a_row_shows(
    owner: Connection, texts: tuple[str, ...], change: str, level: str
) -> None:
    """The triggers of the innermost statement run before those of all others; each text comes more than once."""
    keyword_store(owner, ["cat", "dog and cat", "bird"])
    then = "; ".join(f"UPDATE public.docs SET segment = {text!r} WHERE segment <> 'bird'" for text in texts)
    owner.execute(AGAIN.format(then, "INSERT OR UPDATE", level).replace("= 0", "< 3"))
    owner.execute(change)
    assert_scores(owner, "fox dog cat bird elk")


PEEL = "UPDATE public.docs SET segment = regexp_replace(segment, '^fox ', '') WHERE segment ~ '^fox '"
THRICE = f"{INSERT} VALUES ('d', '{{}}', 9, 1, 'fox fox fox owl')"


@pytest.mark.parametrize(
    ("event", "then", "change"),
    [
        ("INSERT OR UPDATE", f"IF pg_trigger_depth() < 4 THEN {PEEL}; END IF", THRICE),
        ("UPDATE", PEEL, "UPDATE docs SET segment = 'fox fox fox owl' WHERE document_id < 3"),
        (
            "DELETE", "UPDATE public.docs SET segment = segment || ' cub' WHERE document_id = OLD.document_id",
            f"WITH gone AS (DELETE FROM docs RETURNING *) {INSERT}"
            " SELECT 'd', '{}', document_id, 1, segment FROM gone",
        ),
        (
            "INSERT", "IF pg_trigger_depth() < 4 THEN DELETE FROM public.docs WHERE document_id = NEW.document_id;"
            " INSERT INTO public.docs SELECT (NEW).*; END IF", THRICE,
        ),
    ],
)  # fmt: skip
def test_what_triggers_do_again_and_again_shows(owner: Connection, event: str, then: str, change: str) -> None:
    keyword_store(owner, ["cat", "dog and cat", "bird"])
    owner.execute(
        f"CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {then}; RETURN NULL; END$$;"
        f"CREATE TRIGGER again AFTER {event} ON docs FOR EACH ROW EXECUTE FUNCTION again()"
    )
    owner.execute(change)
    assert_scores(owner, "fox dog cat bird owl cub")
    owner.execute("DROP TRIGGER again ON docs")
    owner.execute("UPDATE docs SET segment = 'fox'")
    assert_scores(owner, "fox dog cat bird owl cub")
    assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_owed").fetchone() == (0,)


@pytest.mark.parametrize(
    "change",
    [
        f"WITH new AS ({THRICE} RETURNING document_id) SELECT peel(document_id) FROM new",
        f"{THRICE} RETURNING peel(document_id)",
        "UPDATE docs SET segment = 'fox fox owl' RETURNING peel(document_id)",
    ],
)
@pytest.mark.parametrize("language", ["sql", "plpgsql"])
def test_what_a_function_in_a_statement_does_to_its_rows_again_shows(
    owner: Connection, change: str, language: str
) -> None:
    keyword_store(owner, ["cat", "dog and cat", "bird"])
    body = f"{PEEL} AND document_id = $1;"
    owner.execute(
        f"CREATE FUNCTION peel(bigint) RETURNS void LANGUAGE {language} AS $$"
        f"{f'BEGIN {body} END' if language == 'plpgsql' else body}$$"
    )
    owner.execute(change)
    assert_scores(owner, "fox dog cat bird owl")
    assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_owed").fetchone() == (0,)


@pytest.mark.parametrize("former", ["cat", None])
@pytest.mark.parametrize("text", ["'fox'", "segment"])
def test_a_statement_may_put_a_row_in_the_place_of_one_that_it_deletes(
    owner: Connection, text: str, former: str | None
) -> None:
    """Triggers of its INSERT run before those of its DELETE, which ends later."""
    keyword_store(owner, [former, "dog and cat", "bird"])
    owner.execute(
        "WITH gone AS (DELETE FROM docs WHERE document_id < 3 RETURNING *)"
        f" {INSERT} SELECT 'd', '{{}}', document_id, segment_number, {text} FROM gone LIMIT 1"
    )
    assert_scores(owner, "fox dog cat bird")


def test_what_was_written_with_triggers_off_is_taken_away_by_its_key(owner: Connection) -> None:
    keyword_store(owner, ["cat", "dog", "bird"])
    off = "SET session_replication_role = replica; UPDATE docs SET segment = 'fox'; RESET session_replication_role"
    owner.execute(off)
    owner.execute("UPDATE docs SET segment = 'owl'")
    assert_scores(owner, "fox dog cat bird owl")
    owner.execute(off)
    owner.execute(AGAIN.format("UPDATE public.docs SET segment = 'hen'", "INSERT", "STATEMENT"))
    owner.execute(f"{INSERT} VALUES ('d', '{{}}', 9, 1, 'cub')")
    assert_scores(owner, "fox dog cat bird owl hen cub")
    owner.execute(off)
    owner.execute("DELETE FROM docs WHERE document_id < 3")
    assert_scores(owner, "fox dog cat bird owl hen cub")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_owed").fetchone() == (0,)


def test_an_update_of_other_columns_leaves_the_index_alone(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog", None])
    before = owner.execute("SELECT xmin, * FROM ml_rag_internal.keyword_row ORDER BY id").fetchall()
    owner.execute("UPDATE docs SET metadata = '{}', segment = segment, segment_embedding = '[1,1,1]'")
    assert owner.execute("SELECT xmin, * FROM ml_rag_internal.keyword_row ORDER BY id").fetchall() == before
    assert waiting(owner) == (0, 0)


def test_a_null_that_becomes_an_empty_text_is_a_row_more(owner: Connection) -> None:
    """No word comes or goes, but the number of rows is in every score."""
    keyword_store(owner, ["fox", "dog", None])
    for segment in ("", None, ""):
        owner.execute("UPDATE docs SET segment = %s WHERE document_id = 3", (segment,))
        assert_exact(owner, "fox dog")


@pytest.mark.parametrize("rows", [3, 1500])
@pytest.mark.parametrize("name", ["docs", "own"])
def test_an_update_of_other_columns_numbers_no_row_anew(owner: Connection, name: str, rows: int) -> None:
    """Of a store's usual columns and of a table's own, of few rows and of many."""
    column = "segment" if name == "docs" else "body"
    owner.execute(
        f"CREATE TABLE {name} (document_id integer, segment_number integer, {column} text, note integer,"
        f" PRIMARY KEY (document_id, segment_number));"
        f"INSERT INTO {name} SELECT i, 1, 'fox ' || i, 0 FROM generate_series(1, {rows}) AS i"
    )
    enable(owner, name, json.dumps({"segment": column}))
    numbers = f"SELECT array_agg(id ORDER BY id) FROM ml_rag_internal.keyword_row WHERE store = '{name}'::regclass"
    before = owner.execute(numbers).fetchone()
    owner.execute(f"UPDATE {name} SET note = note + 1")
    owner.execute(f"UPDATE {name} SET note = note + 1 WHERE document_id = 2")
    assert owner.execute(numbers).fetchone() == before
    assert waiting(owner, name) == (0, 0)
    owner.execute(f"UPDATE {name} SET {column} = 'dog' WHERE document_id = 2")
    assert waiting(owner, name) == (1, 1)
    owner.execute(f"UPDATE {name} SET note = 7, document_id = -document_id WHERE document_id = 3")
    assert waiting(owner, name) == (2, 2)


def test_an_update_of_other_columns_costs_a_part_of_one_of_the_text(owner: Connection) -> None:
    """A twentieth; a half where both plan statements of their own."""
    keyword_store(owner, ["fox"])

    def seconds(columns: str) -> float:
        """Of 200 updates, each a statement; the least of three times."""
        times = []
        for _ in range(3):
            start = time.perf_counter()
            owner.execute(f"DO $$ BEGIN FOR i IN 1..200 LOOP UPDATE docs SET {columns}; END LOOP; END $$")
            times.append(time.perf_counter() - start)
        return min(times)

    assert 4 * seconds("metadata = '{}'") < seconds("segment = md5(random()::text)")


@pytest.mark.parametrize("change", ["UPDATE docs SET segment = 'hen'", "DELETE FROM docs"])
def test_a_row_is_found_by_its_key_before_there_are_statistics(owner: Connection, change: str) -> None:
    """Statistics of the other tables alone say that this one has one row in the index."""
    owner.execute("CREATE TABLE other (id integer PRIMARY KEY, segment text)")
    enable(owner, "other")
    owner.execute("INSERT INTO other SELECT i, 'fox ' || i FROM generate_series(1, 5000) AS i")
    owner.execute("ANALYZE ml_rag_internal.keyword_row")
    keyword_store(owner, [])
    owner.execute(f"{INSERT} SELECT 'd', '{{}}', i, 1, 'fox ' || i FROM generate_series(1, 5000) AS i")

    def rows_read() -> int:
        found = owner.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_all_tables WHERE relname = 'keyword_row'"
        ).fetchone()
        return int(found[0]) if found else 0

    with owner.transaction():
        before = rows_read()
        owner.execute(f"{change} WHERE document_id = 9")
        assert 0 < rows_read() - before < 10


def test_keys_that_change_places_in_one_statement(owner: Connection) -> None:
    owner.execute(f"CREATE TABLE docs ({COLUMNS.format(type='vector(3)')})".replace(
        "PRIMARY KEY (document_id, segment_number)", "UNIQUE (document_id, segment_number)"))  # fmt: skip
    mark(owner, "docs")
    add(owner, ["fox", "dog"], 1)
    enable(owner)
    owner.execute("UPDATE docs SET segment = CASE document_id WHEN 1 THEN 'dog' ELSE 'fox' END")
    assert found(owner) == [2]
    assert_exact(owner, "fox dog")


def test_copy_merge_and_on_conflict(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog"])
    with owner.cursor().copy(
        "COPY docs (document_name, metadata, document_id, segment_number, segment) FROM STDIN"
    ) as c:
        for i in range(3, 6):
            c.write_row((f"d{i}", "{}", i, 1, "fox"))
    assert found(owner) == [1, 3, 4, 5]
    insert = "INSERT INTO docs SELECT 'd' || i, '{}', i, 1, 'wolf' FROM generate_series(5, 6) AS i ON CONFLICT "
    owner.execute(insert + "DO NOTHING")
    assert (found(owner), found(owner, "wolf")) == ([1, 3, 4, 5], [6])
    owner.execute(insert + "(document_id, segment_number) DO UPDATE SET segment = excluded.segment")
    assert (found(owner), found(owner, "wolf")) == ([1, 3, 4], [5, 6])
    owner.execute(
        "MERGE INTO docs AS t USING (VALUES (1, 'wolf'), (3, NULL), (9, 'fox')) AS s (id, segment)"
        " ON t.document_id = s.id"
        " WHEN MATCHED AND s.segment IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET segment = s.segment"
        " WHEN NOT MATCHED THEN INSERT VALUES ('d' || s.id, '{}', s.id, 1, s.segment)"
    )
    assert (found(owner), found(owner, "wolf")) == ([4, 9], [1, 5, 6])
    assert_exact(owner, "fox wolf dog")


def test_truncate(owner: Connection) -> None:
    keyword_store(owner, ["fox"] * 3)
    add(owner, ["fox"], 4)
    owner.execute("BEGIN; TRUNCATE docs")
    assert found(owner) == []
    owner.execute("ROLLBACK")
    assert found(owner) == [1, 2, 3, 4]
    owner.execute("TRUNCATE docs")
    assert found(owner) == []
    assert runs(owner) == []
    assert waiting(owner) == (0, 0)
    add(owner, ["fox"], 5)
    assert_exact(owner, "fox")


def test_rollback_and_savepoints(owner: Connection) -> None:
    keyword_store(owner, ["fox", "dog"])
    owner.execute("BEGIN")
    add(owner, ["fox"], 3)
    owner.execute("SAVEPOINT a")
    owner.execute("DELETE FROM docs WHERE document_id = 1")
    add(owner, ["fox fox"], 4)
    assert found(owner) == [3, 4]
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert found(owner) == [3, 4]
    assert_exact(owner, "fox dog")
    owner.execute("ROLLBACK TO a")
    assert found(owner) == [1, 3]
    assert_exact(owner, "fox dog")
    owner.execute("ROLLBACK")
    assert found(owner) == [1]
    assert_exact(owner, "fox dog")


def test_many_random_changes_keep_the_index_exact(owner: Connection) -> None:
    """Whatever happens, what the index answers is BM25 over the table as it is, own uncommitted changes included."""
    generator = random.Random(3)
    keyword_store(owner, options='{"language": "simple"}')

    def text() -> str:
        return " ".join(generator.choices(WORDS, weights=range(30, 0, -1), k=generator.randrange(12)))

    def insert(n: int) -> None:
        first = generator.randrange(10**9)
        owner.execute(
            "INSERT INTO docs SELECT 'd' || ($1 + place), '{}', $1 + place, 1, t"
            " FROM unnest($2::text[]) WITH ORDINALITY AS u (t, place)".replace("$1", "%s::bigint").replace("$2", "%s"),
            (first, first, [text() for _ in range(n)]),
        )  # fmt: skip

    for step in range(60):
        match generator.randrange(9):
            case 0:
                insert(generator.choice([1, 5, 300, 1200]))
            case 1 | 2:
                insert(generator.randrange(1, 40))
            case 3:
                owner.execute("DELETE FROM docs WHERE document_id %% 5 = %s", (generator.randrange(5),))
            case 4:
                owner.execute(
                    "UPDATE docs SET segment = %s WHERE document_id %% 7 = %s", (text(), generator.randrange(7))
                )
            case 5:
                owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
            case 6 if owner.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                owner.execute("BEGIN")
            case 7:
                owner.execute("ROLLBACK" if generator.random() < 0.5 else "COMMIT")
            case 8 if step % 3 == 0:
                owner.execute("TRUNCATE docs")
        assert_exact(owner, " ".join(generator.sample(WORDS, 4)), configuration="simple")
    owner.execute("ROLLBACK")


# -- merging ----------------------------------------------------------------------------------------------------------


def fill(connection: Connection, n: int, first: int = 1, text: str = "'fox ' || i") -> None:
    connection.execute(
        f"INSERT INTO docs SELECT 'd' || i, '{{}}', i, 1, {text} FROM generate_series({first}, {first + n - 1}) AS i"
    )


def test_a_large_statement_merges_its_own_rows(owner: Connection) -> None:
    keyword_store(owner)
    fill(owner, 999)
    assert (waiting(owner), runs(owner)) == ((999, 0), [])
    fill(owner, 1000, 1000)
    assert waiting(owner)[0] == 0
    assert sum(n for n, _ in runs(owner)) == 1999
    assert found(owner) == list(range(1, 2000))


@pytest.mark.parametrize("name", ["docs", "own"])
def test_long_texts_do_not_wait(owner: Connection, name: str) -> None:
    """Each search would read them, whoever wrote them."""
    keyword_store(owner, ["fox"])
    owner.execute("CREATE TABLE own (LIKE docs, id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY)")
    mark(owner, "own")
    enable(owner, "own")
    long = " ".join(f"fox{i} dog" for i in range(12_000))
    add(owner, [long, "fox cub"], 2, name)
    add(owner, [long[:90_000]], 4, name)
    assert waiting(owner, name)[0] == 1
    # many of usual length do: to make a run of each such statement takes twice as long
    add(owner, ["fox " * 500] * 100, 100, name)
    assert waiting(owner, name)[0] == 101
    owner.execute(f"UPDATE {name} SET segment = segment || ' cub' WHERE document_id IN (2, 4)")
    assert_scores(owner, "fox fox9 fox11999 dog cub", name)


def test_runs_of_long_texts_are_merged_by_whoever_may(owner: Connection, asker: Connection) -> None:
    keyword_store(owner)
    owner.execute("REVOKE SELECT ON docs FROM ml_rag_user; GRANT INSERT ON docs TO ml_rag_user")
    for i in range(1, 121):
        add(asker, ["fox " + "x" * 100_000], i)
    assert len(runs(owner)) == 120
    for i in range(1000, 2000):
        add(owner, ["fox"], i)
        if len(runs(owner)) < 100:
            break
    assert len(runs(owner)) < 100
    assert_exact(owner, "fox")


def test_what_waits_stays_bounded_with_small_statements(owner: Connection) -> None:
    keyword_store(owner)
    for first in range(1, 6000, 20):
        fill(owner, 20, first)
    assert waiting(owner)[0] < 2000
    assert found(owner) == list(range(1, 6001))
    owner.execute("DELETE FROM docs WHERE document_id % 2 = 0")
    assert waiting(owner) == (0, 0)
    assert found(owner) == list(range(1, 6001, 2))
    assert_exact(owner, "fox 17")


def test_runs_are_merged(owner: Connection) -> None:
    keyword_store(owner)
    for first in range(1, 20_000, 1000):
        fill(owner, 1000, first)
    assert len(runs(owner)) <= 10
    owner.execute("DELETE FROM docs WHERE document_id <= 12000")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert runs(owner) == [(8000, 0)]
    assert found(owner) == list(range(12_001, 20_001))
    assert_exact(owner, "fox 12345")
    owner.execute("DELETE FROM docs")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert (runs(owner), waiting(owner)) == ([], (0, 0))
    assert owner.execute("SELECT count(*) FROM ml_rag_internal.keyword_posting").fetchone() == (0,)


def test_runs_end_at_65536_rows(owner: Connection) -> None:
    keyword_store(owner)
    fill(owner, 70_000, text="CASE WHEN i % 1000 = 0 THEN 'fox' ELSE 'dog' END")
    assert runs(owner) == [(65_536, 0), (4464, 0)]
    assert found(owner) == list(range(1000, 70_001, 1000))
    owner.execute("DELETE FROM docs WHERE document_id IN (1000, 66000, 70000)")
    assert found(owner) == [i for i in range(2000, 70_000, 1000) if i != 66_000]


def test_words_that_stand_there_hundreds_of_times(owner: Connection) -> None:
    keyword_store(owner, ["fox " * 255, "fox " * 256, "fox " * 20_000, "fox", "dog"])
    assert_exact(owner, "fox dog")
    add(owner, ["fox " * 300, "dog"], 6)
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert runs(owner) == [(7, 0)]
    assert_exact(owner, "fox dog")


def test_nothing_is_merged_under_repeatable_read(owner: Connection, db: Database) -> None:
    """What others have merged since the snapshot must not make the transaction fail."""
    keyword_store(owner)
    fill(owner, 900)
    other = db.connect()
    other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert len(found(other)) == 900
    fill(owner, 5000, 1001)
    owner.execute("DELETE FROM docs WHERE document_id <= 10")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert found(other) == list(range(1, 901))
    for first in range(20_000, 21_000, 100):
        fill(other, 100, first)
    fill(other, 1500, 30_000)
    other.execute("DELETE FROM docs WHERE document_id BETWEEN 11 AND 20 OR document_id BETWEEN 30000 AND 30100")
    other.execute("UPDATE docs SET segment = 'fox again' WHERE document_id BETWEEN 21 AND 30")
    expected = [*range(21, 901), *range(20_000, 21_000), *range(30_101, 31_500)]
    assert found(other) == [*range(1, 11), *expected]
    other.execute("COMMIT")
    assert found(owner) == sorted([*expected, *range(1001, 6001)])
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert found(owner) == sorted([*expected, *range(1001, 6001)])
    assert_exact(owner, "fox again 21")


# -- several at once --------------------------------------------------------------------------------------------------


def test_two_writers_do_not_wait_for_each_other(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"] * 10)
    one, two = db.connect(), db.connect()
    for connection in (one, two):
        connection.execute("SET lock_timeout = '2s'; BEGIN")
    add(one, ["fox new"], 11)
    add(two, ["fox new"], 12)
    one.execute("DELETE FROM docs WHERE document_id = 1")
    two.execute("DELETE FROM docs WHERE document_id = 2")
    fill(one, 1000, 1000)
    fill(two, 1000, 2000)
    # one merges all that is pending; two deletes what is being merged
    one.execute("SELECT ml_rag.merge_keyword_index('docs')")
    two.execute("DELETE FROM docs WHERE document_id = 3")
    two.execute("UPDATE docs SET segment = 'dog' WHERE document_id = 4")
    fill(two, 1000, 3000)
    mine = [*range(5, 11)]
    assert found(one) == [2, 3, 4, *mine, 11, *range(1000, 2000)]
    assert found(two) == [1, *mine, 12, *range(2000, 4000)]
    two.execute("COMMIT")
    assert found(one) == [*mine, 11, 12, *range(1000, 4000)]
    one.execute("COMMIT")
    assert found(owner) == [*mine, 11, 12, *range(1000, 4000)]
    assert_exact(owner, "fox new dog 1500")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert waiting(owner) == (0, 0)
    assert_exact(owner, "fox new dog 1500")


def test_many_sessions_at_once(owner: Connection, db: Database) -> None:
    keyword_store(owner)
    problems: list[Exception] = []

    def work(number: int) -> None:
        try:
            generator = random.Random(number)
            with psycopg.connect(db.dsn, dbname=db.name, autocommit=True) as connection:
                connection.execute("SET lock_timeout = '20s'")
                for i in range(12):
                    first = number * 1_000_000 + i * 1000
                    connection.execute("BEGIN")
                    fill(connection, generator.choice([1, 30, 400, 1000]), first)
                    connection.execute(
                        "DELETE FROM docs WHERE document_id BETWEEN %s AND %s AND document_id %% 3 = 0",
                        (first - 1000, first),
                    )
                    connection.execute("COMMIT" if generator.random() < 0.8 else "ROLLBACK")
                    if i % 4 == 0:
                        connection.execute("SELECT ml_rag.merge_keyword_index('docs')")
                    seen = search(connection, "fox", 5)
                    assert all(score > 0 for _, _, score in seen)
        except (AssertionError, psycopg.Error) as e:
            problems.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert_exact(owner, "fox 1001001")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert_exact(owner, "fox 1001001")


def test_a_reader_keeps_its_snapshot_while_runs_are_replaced(owner: Connection, db: Database) -> None:
    keyword_store(owner)
    for first in range(1, 8000, 1000):
        fill(owner, 1000, first)
    reader = db.connect()
    reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    before = search(reader, "fox 77", 100_000)
    owner.execute("DELETE FROM docs WHERE document_id % 2 = 0")
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    fill(owner, 3000, 10_000)
    owner.execute("SELECT ml_rag.merge_keyword_index('docs')")
    assert search(reader, "fox 77", 100_000) == before
    reader.execute("COMMIT")
    assert search(reader, "fox 77", 100_000) == search(owner, "fox 77", 100_000)


def test_only_owners_can_hold_up_who_empties_an_index(owner: Connection, asker: Connection) -> None:
    keyword_store(owner, ["fox"])
    with error("42501", ours=False):
        asker.execute("SELECT ml_rag._python('merge_keywords', jsonb_build_array('docs'::regclass::oid::int8, true))")
    with error("42501", "must be owner"):
        asker.execute("SELECT ml_rag.merge_keyword_index('docs')")
    asker.execute("BEGIN")
    with error("42501", "must be owner"):
        asker.execute("SELECT ml_rag._python('merge_own_keywords', jsonb_build_array('docs'::regclass::oid::int8))")
    owner.execute("SET lock_timeout = '2s'; TRUNCATE docs")
    asker.execute("COMMIT")


def test_emptying_waits_for_who_merges(owner: Connection, db: Database) -> None:
    keyword_store(owner, ["fox"])
    add(owner, ["fox"], 2)
    merging = db.connect()
    merging.execute("BEGIN; SELECT ml_rag.merge_keyword_index('docs')")
    owner.execute("SET lock_timeout = '200ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        owner.execute("TRUNCATE docs")
    fill(owner, 1500, 10)
    assert len(found(owner)) == 1502
    merging.execute("COMMIT")
    owner.execute("TRUNCATE docs")
    assert (runs(owner), waiting(owner)) == ([], (0, 0))
