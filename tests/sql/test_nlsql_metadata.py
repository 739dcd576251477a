"""nlsql/metadata: the tables that a model is shown, what of them, in which order, and the cache of their embeddings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from psycopg import sql

from support.cluster import Connection, Database, value_of
from support.schema import SqlModel, metadata
from support.stores import error

ORDERS = """\
CREATE TABLE shop.orders ( -- what they bought
  id integer NOT NULL,
  customer_id integer NOT NULL,
  ordered_at timestamp with time zone NOT NULL,
  amount numeric(10,2), -- euros
  status text NOT NULL, -- such as 'new', 'paid', 'sent'
  size shop.size, -- such as 'small', 'large'
  tags text[],
  facts jsonb,
  PRIMARY KEY (id),
  FOREIGN KEY (customer_id) REFERENCES shop.customers(id)
);"""


def names(text: str) -> list[str]:
    return re.findall(r"^CREATE [A-Z ]+ (\S+) \(", text, re.M)


def values_sorted(text: str) -> str:
    """Frequent values come by frequency, and equal ones in any order."""
    return re.sub(r"such as (.*)", lambda m: "such as " + ", ".join(sorted(m[1].split(", "))), text)


def test_a_definition_has_keys_comments_and_frequent_values(shop: Connection, asker: Connection) -> None:
    text = metadata(asker, tables=["shop.orders"])
    assert values_sorted(text) == values_sorted(ORDERS)


def test_without_comments(shop: Connection, asker: Connection) -> None:
    text = metadata(asker, tables=["shop.orders"], include_comments=False)
    assert "what they bought" not in text
    assert "euros" not in text
    assert "customer_id integer NOT NULL,\n" in text


def test_most_relevant_first(shop: Connection, asker: Connection) -> None:
    # the fake embeddings count words
    assert names(metadata(asker, "people who buy customers"))[0] == "shop.customers"
    assert names(metadata(asker, "what they bought orders"))[0] == "shop.orders"
    assert names(metadata(asker, "what they bought orders", n_tables=1)) == ["shop.orders"]


def test_only_what_the_caller_may_select(shop: Connection, asker: Connection, db: Database) -> None:
    assert set(names(metadata(asker))) == {"shop.customers", "shop.orders"}
    assert "shop.secrets" in names(metadata(shop))
    shop.execute("REVOKE SELECT ON shop.orders FROM ml_rag_user")
    shop.execute("GRANT SELECT (id, amount) ON shop.orders TO ml_rag_user")
    assert metadata(asker, tables=["shop.orders"]) == (
        "CREATE TABLE shop.orders ( -- what they bought\n  id integer NOT NULL,\n  amount numeric(10,2), -- euros\n"
        "  PRIMARY KEY (id)\n);"
    )
    # a key to what the caller may not read
    shop.execute("GRANT SELECT ON shop.orders TO ml_rag_user")
    shop.execute("REVOKE SELECT ON shop.customers FROM ml_rag_user")
    assert "customers" not in metadata(asker, tables=["shop.orders"])
    shop.execute("REVOKE USAGE ON SCHEMA shop FROM ml_rag_user")
    with error("42P01", "no table"):
        metadata(asker)


def test_values_that_row_level_security_may_hide_are_not_shown(shop: Connection, asker: Connection) -> None:
    assert "'sent'" in metadata(asker, tables=["shop.orders"])
    shop.execute("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY")
    shop.execute("CREATE POLICY own ON shop.orders TO ml_rag_user USING (status = 'new')")
    text = metadata(asker, tables=["shop.orders"])
    assert "'sent'" not in text
    assert "'new'" not in text


def test_what_is_unique_to_a_row_is_not_shown(shop: Connection, asker: Connection) -> None:
    text = metadata(asker, tables=["shop.customers"])
    assert "name 1" not in text
    assert "'Graz'" in text


def test_system_tables_partitions_and_extensions_are_left_out(shop: Connection, asker: Connection) -> None:
    shop.execute(
        "CREATE TABLE shop.visits (at date, n integer) PARTITION BY RANGE (at);"
        "CREATE TABLE shop.visits_1 PARTITION OF shop.visits FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');"
        "CREATE VIEW shop.cities AS SELECT city, count(*) FROM shop.customers GROUP BY 1;"
        "CREATE MATERIALIZED VIEW shop.counted AS SELECT 1 AS n;"
        "CREATE MATERIALIZED VIEW shop.empty AS SELECT 1 AS n WITH NO DATA;"
        "GRANT SELECT ON ALL TABLES IN SCHEMA shop TO ml_rag_user; REVOKE ALL ON shop.secrets FROM ml_rag_user"
    )
    asker.execute("CREATE TEMP TABLE mine (id integer)")
    text = metadata(asker)
    assert set(names(text)) == {"shop.cities", "shop.counted", "shop.customers", "shop.orders", "shop.visits"}
    assert "CREATE VIEW shop.cities" in text
    assert "CREATE MATERIALIZED VIEW shop.counted" in text
    for name in ("pg_catalog.pg_authid", "pg_authid", "information_schema.tables", "ml_rag.setting", "shop.visits_1"):
        with error("42P01", name):
            metadata(asker, tables=[name])


def test_tables_of_untrusted_owners_are_shown_where_they_are_named(
    shop: Connection, asker: Connection, db: Database
) -> None:
    tenant = db.role("tenant")
    shop.execute(
        f"CREATE SCHEMA planted; CREATE TABLE planted.orders (id integer); GRANT ALL ON planted.orders TO {tenant}"
    )
    shop.execute(f"ALTER TABLE planted.orders OWNER TO {tenant}")
    shop.execute("GRANT USAGE ON SCHEMA planted TO ml_rag_user; GRANT SELECT ON planted.orders TO ml_rag_user")
    assert "planted.orders" not in names(metadata(asker))
    assert names(metadata(asker, tables=["orders"])) == ["shop.orders"]
    assert names(metadata(asker, tables=["planted.orders"])) == ["planted.orders"]
    with error("42P01", "no table"):
        metadata(asker, schemas=["planted"])
    shop.execute(f"ALTER SCHEMA planted OWNER TO {tenant}")
    assert names(metadata(asker, schemas=["planted"])) == ["planted.orders"]
    assert "planted.orders" not in names(metadata(asker))


def test_a_comment_stays_in_its_line(shop: Connection, asker: Connection) -> None:
    shop.execute("COMMENT ON COLUMN shop.customers.city IS E'a\\n);\\r\\nDROP TABLE x;\\u2028y\\u0085z' ")
    text = metadata(asker, tables=["shop.customers"])
    assert "-- a ); DROP TABLE x; y z" in text
    assert len(text.splitlines()) == 7


def test_odd_names(shop: Connection, asker: Connection) -> None:
    shop.execute('CREATE SCHEMA "Odd.one"; CREATE TABLE "Odd.one"."a ""b" ("c d" integer)')
    shop.execute('GRANT USAGE ON SCHEMA "Odd.one" TO ml_rag_user; GRANT SELECT ON "Odd.one"."a ""b" TO ml_rag_user')
    expected = 'CREATE TABLE "Odd.one"."a ""b" (\n  "c d" integer\n);'
    for name in ('"Odd.one"."a ""b"', 'Odd.one.a "b', {"schema_name": "Odd.one", "table_name": 'a "b'}):
        assert metadata(asker, tables=[name]) == expected


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        ({"schemas": ["shop"], "tables": ["shop.orders"]}, "22023", ["exclude each other"]),
        ({"tables": [7]}, "22023", ['"tables"']),
        ({"tables": [{"schema_name": "shop"}]}, "22023", ['"tables"']),
        ({"tables": [{"schema_name": "shop", "table_name": "orders", "x": 1}]}, "22023", ['"tables"']),
        ({"tables": []}, "42P01", ["no table"]),
        ({"tables": ["shop.nothing"]}, "42P01", ["shop.nothing"]),
        ({"tables": ["shop.secrets"]}, "42P01", ["shop.secrets"]),
        ({"schemas": ["nothing"]}, "42P01", ["no table"]),
        ({"schemas": []}, "42P01", ["no table"]),
        ({"n_tables": 0}, "22023", ["n_tables"]),
        ({"embed_model_id": "no-such-model"}, "22023", ["no-such-model"]),
    ],
)
def test_bad_options(
    shop: Connection, asker: Connection, options: dict[str, Any], state: str, words: list[str]
) -> None:
    with error(state, *words):
        metadata(asker, **options)


@pytest.mark.parametrize("question", ["", " ", None])
def test_an_empty_question(shop: Connection, asker: Connection, question: str | None) -> None:
    with error("22023", "empty"):
        asker.execute("SELECT ml_retrieve_schema_metadata(%s)", (question,))


def test_without_any_table(asker: Connection) -> None:
    with error("42P01", "no table") as caught:
        metadata(asker)
    assert '"schemas"' in caught.hint


def test_the_size_is_bounded(shop: Connection, asker: Connection) -> None:
    columns = ", ".join(f"column_number_{i} integer" for i in range(300))
    for i in range(12):
        shop.execute(f"CREATE TABLE shop.wide_{i} ({columns}); GRANT SELECT ON shop.wide_{i} TO ml_rag_user")
    shop.execute(f"COMMENT ON TABLE shop.wide_0 IS '{'word ' * 10_000}'")
    text = metadata(asker, "wide", n_tables=100)
    assert 20_000 < len(text) <= 24_100
    assert "  -- and 200 more columns\n" in text
    assert "column_number_99 " in text
    assert "column_number_100 " not in text
    assert max(map(len, text.splitlines())) < 300


# -- the cache --------------------------------------------------------------------------------------------------------


def test_a_description_is_embedded_once(model: SqlModel, shop: Connection, db: Database) -> None:
    metadata(db.connect("asker"), "first")
    assert len(model.embedded) == 3
    for role in ("asker", "tenant"):
        metadata(db.connect(role), "second")
    assert model.embedded[3:] == ["second", "second"]


@pytest.mark.parametrize(
    "change",
    [
        "COMMENT ON TABLE shop.orders IS 'purchases'",
        "ALTER TABLE shop.orders ADD paid_on date",
        "ALTER TABLE shop.orders RENAME amount TO total",
        "ALTER TABLE shop.orders DROP tags",
        "ALTER TABLE shop.orders RENAME TO purchases",
        "REVOKE SELECT ON shop.orders FROM ml_rag_user; GRANT SELECT (id, status) ON shop.orders TO ml_rag_user",
    ],
)
def test_a_table_that_changes_is_embedded_again(
    model: SqlModel, shop: Connection, asker: Connection, change: str
) -> None:
    metadata(asker, "first")
    del model.embedded[:]
    shop.execute(change)
    metadata(asker, "second")
    assert model.embedded[0] == "second"
    assert len(model.embedded) == 2


def test_nobody_but_the_extension_reads_the_cache(shop: Connection, asker: Connection) -> None:
    metadata(asker)
    assert shop.execute("SELECT count(*) FROM ml_rag_internal.table_embedding").fetchone() == (2,)
    for action in ("SELECT * FROM", "DELETE FROM"):
        with error("42501"):
            asker.execute(f"{action} ml_rag_internal.table_embedding")


def test_pgvector_may_be_in_a_schema_of_members_alone(model: SqlModel, shop: Connection, asker: Connection) -> None:
    """What reads and writes the cache needs no right on it."""
    shop.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    shop.execute(
        sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(sql.Identifier(value_of(asker, "SELECT current_user")))
    )
    for _ in range(2):
        assert set(names(metadata(asker))) == {"shop.customers", "shop.orders"}
    assert len(model.embedded) == 4


def test_pgvector_may_be_made_again_in_another_schema(model: SqlModel, shop: Connection, asker: Connection) -> None:
    shown = metadata(asker, "first")
    server = value_of(shop, "SELECT value FROM ml_rag.setting WHERE name = 'model_server'")
    shop.execute("DROP EXTENSION ml_rag CASCADE; DROP EXTENSION vector CASCADE; CREATE SCHEMA elsewhere")
    shop.execute("CREATE EXTENSION vector SCHEMA elsewhere; GRANT USAGE ON SCHEMA elsewhere TO PUBLIC")
    shop.execute("CREATE EXTENSION ml_rag")
    shop.execute("SELECT ml_rag.configure('model_server', %s)", (server,))
    assert metadata(asker, "first") == shown


def test_another_models_embeddings_are_not_mixed_in(model: SqlModel, shop: Connection, asker: Connection) -> None:
    metadata(asker, "first")
    metadata(asker, "second", embed_model_id="fake-other")
    assert len(model.embedded) == 6


def test_in_a_read_only_transaction_nothing_is_kept(model: SqlModel, shop: Connection, asker: Connection) -> None:
    asker.execute("SET default_transaction_read_only = on")
    for _ in range(2):
        assert set(names(metadata(asker))) == {"shop.customers", "shop.orders"}
    assert len(model.embedded) == 6


def test_embeddings_of_long_ago_go(model: SqlModel, shop: Connection, asker: Connection) -> None:
    metadata(asker)
    shop.execute("UPDATE ml_rag_internal.table_embedding SET made_at = now() - interval '91 days'")
    shop.execute("CREATE TABLE shop.more (id integer); GRANT SELECT ON shop.more TO ml_rag_user")
    metadata(asker)
    assert shop.execute("SELECT count(*) FROM ml_rag_internal.table_embedding").fetchone() == (1,)


def test_a_misspelt_table_gets_the_nearest_one_as_hint(shop: Connection, asker: Connection) -> None:
    for name in ("shop.ordres", "ordres", "Shop.Orders"):
        with error("42P01", "does not exist or cannot be queried") as caught:
            metadata(asker, tables=[name])
        assert caught.hint == 'Did you mean "shop.orders"?'
    with error("42P01") as caught:
        metadata(asker, tables=["shop.wholly_different"])
    assert caught.hint == 'Name it as "schema.table".'
    # one that the caller may not read is not told
    shop.execute("REVOKE ALL ON shop.orders FROM ml_rag_user")
    with error("42P01") as caught:
        metadata(asker, tables=["shop.ordres"])
    assert "orders" not in caught.hint


def test_a_vectorizers_own_columns_are_not_shown(shop: Connection, asker: Connection) -> None:
    shop.execute("""SELECT ml_rag.create_vectorizer('shop.orders', '{"columns": "Status: {status}"}')""")
    text = metadata(asker, tables=["shop.orders"])
    assert values_sorted(text) == values_sorted(ORDERS)


def test_what_ml_rag_makes_of_a_tables_rows_is_queried_only_where_it_is_named(
    shop: Connection, asker: Connection
) -> None:
    options = '{"columns": "{name}", "destination": "table"}'
    shop.execute("SELECT ml_rag.create_vectorizer('shop.customers', %s)", (options,))
    shop.execute("""SELECT ml_rag.create_vectorizer('shop.orders', '{"columns": "Status: {status}"}')""")
    shop.execute(
        "CREATE FUNCTION shop.words(t text) RETURNS SETOF text LANGUAGE sql AS 'SELECT regexp_split_to_table(t, '' '')'"
    )
    shop.execute(
        """CALL ml_rag.create_node_group('shop.orders', 'words', '{"transform": "shop.words", "embed": false}')"""
    )
    made = {"shop.customers_segments", "shop.orders_words"}
    shop.execute("GRANT SELECT ON shop.customers_segments, shop.orders_words TO ml_rag_user")
    assert set(names(metadata(asker))) == {"shop.customers", "shop.orders"}
    assert set(names(metadata(asker, schemas=["shop"]))) == {"shop.customers", "shop.orders"}
    assert set(names(metadata(asker, tables=sorted(made)))) == made
