"""Every routine that takes options, with whatever stands in ``ml_rag.option`` and anything else: the documented errors
and no others, in the house's form, and a session that goes on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql

from support import fuzzing
from support.cluster import Connection, Database
from support.documented import Routine, routines, states
from support.metrics import METRICS
from support.option_cases import ANYTHING, ODD_TEXTS, TEXTS, Generator, dumps, pick, read
from support.stores import answer, create_store, fake_embedding, mark

FULL, SHORT = 10_000, 600

#: whose options a routine takes, where these do not go by its own name
OPTIONS_OF = {
    "ml_rag.parse_options": ("ml_rag",),
    "ml_rag_answer": ("ml_rag",),
    "ml_rag_show": ("ml_rag",),
    "ml_rag_search": ("ml_rag",),
    "ml_rag.statement": ("ml_rag",),
    "ml_rag.calibrate": ("ml_rag",),
    "ml_rag.tune_index": ("tune_index",),
    "ml_rag.make_questions": ("make_questions",),
    "ml_rag_table": ("ml_rag", "ml_rag_table"),
    "ml_generate_table": ("ml_generate", "ml_generate_table"),
    "ml_rank_rows": ("ml_rank",),
    "ml_rag.filter": ("ml_rag",),
    "ml_rag.generate": ("ml_generate",),
    "vector_store_load": ("vector_store_load",),
    "ml_rag.load_document": ("load_documents",),
    "ml_rag.unchanged_documents": ("load_documents",),
    "nl_sql": ("ml_nl_sql",),
    "ml_rag_chat": ("ml_rag", "ml_rag_chat"),
    "ml_rag.why_not": ("ml_rag",),
    "ml_rag.create_preset": ("ml_rag",),
}
_EMBEDDING = f"'{[round(float(x), 4) for x in fake_embedding('one two')]}'::vector"
_FOUND = 'ml_rag_search(\'one two\', \'{"vector_store": ["docs", "words"], "n_citations": 5}\')'
_HITS = f"ARRAY(SELECT jsonb_populate_record(NULL::ml_rag.hit, to_jsonb(r)) FROM {_FOUND} AS r)"
#: SQL of an argument of a type that has few values worth trying
EXPRESSIONS = {
    ("store", "ml_rag.store"): ["(SELECT s FROM ml_rag.discover(ARRAY['docs']) AS s)"],
    ("server", "name"): ["'nowhere'::name"],
    ("partition", "integer"): ["0", "7"],
    ("store", "regclass"): ["'docs'::regclass", "'words'::regclass", "'texts'::regclass", "'pg_class'::regclass"],
    ("relation", "regclass"): ["'docs'::regclass", "'texts'::regclass", "'pg_class'::regclass"],
    ("query_embedding", "vector"): [_EMBEDDING, "'[1,2,3]'"],
    ("hits", "ml_rag.hit[]"): [_HITS, "'{}'"],
    ("distance_metric", "text"): [f"'{name}'" for name in METRICS],
    ("questions", "text"): ["'TABLE questions'", "'SELECT question FROM questions'", "'SELECT 1'", "'nonsense'"],
    ("questions", "regclass"): ["'questions'::regclass", "'docs'::regclass"],
    ("content", "bytea"): [r"'\x61206220630a0a64'", r"'\x'", r"'\xff00'"],
    ("contents", "bytea[]"): [r"ARRAY['\x61206220630a0a64'::bytea]", "'{}'::bytea[]", r"ARRAY['\x'::bytea, '\x62']"],
    ("sha256", "text[]"): ["ARRAY['x']", "'{}'::text[]"],
}
#: arguments that are left to their defaults
LEFT_OUT = {"output", "result"}

_QUERIES = st.one_of(st.sampled_from(["one two", "what is three?"]), pick(ODD_TEXTS), TEXTS, st.none())
_TARGETS = st.sampled_from(["public.texts.answer", "public.texts.made", "public.made.answer"])
#: arguments as they should be
PLAIN_VALUES: dict[tuple[str, str], Any] = {
    ("routine", "text"): "ml_rag",
    ("parameter", "text"): "$3",
    ("model_id", "text"): "fake-embed-wide",
    ("query", "text"): "one two",
    ("prompt", "text"): "one two",
    ("text", "text"): "one two",
    ("n", "integer"): 5,
    ("input_table_column", "text"): "public.texts.question",
    ("output_table_column", "text"): "public.texts.answer",
    ("name", "text"): "public.made",
    ("names", "text[]"): ["a"],
    ("document_name", "text"): "a",
    ("document", "text"): "a",
    ("segment_number", "bigint"): 1,
    ("page", "integer"): None,
    ("ids", "text[]"): ["1", "2"],
    ("texts", "text[]"): ["one", "two three"],
    ("records", "jsonb"): '[{"id": "1", "text": "one"}, {"id": "2", "text": "two three"}]',
    ("prompt_options", "jsonb"): None,
    ("description", "text"): None,
    ("answer", "text"): "one two",
    ("facts", "jsonb"): '["one two", {"fact_text": "two three"}]',
    ("index", "jsonb"): None,
}
VALUES: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("routine", "text"): TEXTS,
    ("parameter", "text"): TEXTS,
    ("model_id", "text"): TEXTS,
    ("query", "text"): _QUERIES,
    ("prompt", "text"): _QUERIES,
    ("text", "text"): _QUERIES,
    ("n", "integer"): st.integers(-1, 20),
    ("input_table_column", "text"): TEXTS,
    ("output_table_column", "text"): st.one_of(_TARGETS, _TARGETS, TEXTS),
    ("name", "text"): st.one_of(st.sampled_from(["public.docs", "public.texts"]), TEXTS),
    ("names", "text[]"): st.lists(st.one_of(st.just("a"), TEXTS), max_size=2),
    ("document_name", "text"): TEXTS,
    ("document", "text"): TEXTS,
    ("segment_number", "bigint"): st.integers(-1, 9),
    ("page", "integer"): st.one_of(st.none(), st.integers(-1, 9)),
    ("ids", "text[]"): st.lists(TEXTS, max_size=2),
    ("texts", "text[]"): st.lists(TEXTS, max_size=2),
    ("records", "jsonb"): st.one_of(
        st.lists(st.fixed_dictionaries({"id": TEXTS, "text": TEXTS}), max_size=2), ANYTHING
    ).map(dumps),
    ("answer", "text"): _QUERIES,
    ("facts", "jsonb"): st.one_of(
        st.lists(st.one_of(TEXTS, st.fixed_dictionaries({"fact_text": TEXTS})), max_size=2), ANYTHING
    ).map(dumps),
    ("description", "text"): TEXTS,
    ("prompt_options", "jsonb"): st.just('{"order": "best_first"}'),
    ("index", "jsonb"): ANYTHING.map(dumps),
}

#: names that are nobody's business outside of the source
INTERNAL = re.compile(
    r"Traceback|plpy|\bml_rag\._\w+|ml_rag\.backend|internal error|spiexceptions|\bself\.|"
    r"\b(?:Value|Key|Type|Attribute|Index|Recursion|Memory|Overflow|UnicodeEncode|UnicodeDecode)Error\b"
)


@dataclass(frozen=True)
class Case:
    routine: Routine
    statement: str
    values: list[Any]
    options: Any


def options_of(routine: Routine, generator: Generator) -> tuple[str, ...]:
    """Under which names ``ml_rag.option`` has the options of a routine."""
    own = OPTIONS_OF.get(routine.name, (routine.name.removeprefix("ml_rag."),))
    unknown = [name for name in own if name not in generator.options]
    assert not unknown, f"whose options does {routine} take? Say so in OPTIONS_OF"
    return own


Part = tuple[str, Any]


def case_of(routine: Routine, parts: Sequence[Part]) -> Case:
    """A call of these arguments: SQL, and a pair of the value that is bound and the one it was made from."""
    call = f"{routine.name}({', '.join(expression for expression, _ in parts)})"
    options = next((pair[1] for text, pair in parts if text.startswith("options =>")), None)
    values = [pair[0] for text, pair in parts if "%s" in text]
    return Case(routine, f"CALL {call}" if routine.is_procedure else f"SELECT * FROM {call}", values, options)


def option_part(options: Any) -> Part:
    return "options => %s::jsonb", (None if options is None else dumps(options), options)


def plain_case(routine: Routine, options: Any, uri: str) -> Case:
    """These options with arguments that are as they should be."""
    parts: list[Part] = []
    for name, type_ in routine.arguments.items():
        if name == "options":
            parts.append(option_part(options))
        elif expressions := EXPRESSIONS.get((name, type_)):
            parts.append((f"{name} => {expressions[0]}", None))
        elif name not in LEFT_OUT:
            assert name == "uri" or (name, type_) in PLAIN_VALUES, f"add argument {name} {type_} of {routine} to it"
            value = uri if name == "uri" else PLAIN_VALUES[name, type_]
            parts.append((f"{name} => %s::{type_}", (value, None)))
    return case_of(routine, parts)


def cases(routine: Routine, uri: str, options: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """Calls of a routine."""
    parts: list[st.SearchStrategy[Part]] = []
    for name, type_ in routine.arguments.items():
        if name in LEFT_OUT:
            continue
        if name == "options":
            parts.append(options.map(option_part))
        elif expressions := EXPRESSIONS.get((name, type_)):
            parts.append(st.sampled_from([f"{name} => {e}" for e in expressions]).map(lambda e: (e, None)))
        else:
            values = st.one_of(st.just(uri), st.just(uri), TEXTS) if name == "uri" else VALUES.get((name, type_))
            assert values is not None, f"add argument {name} {type_} of {routine} to VALUES or EXPRESSIONS"
            plain = PLAIN_VALUES.get((name, type_))
            values = values if plain is None else st.one_of(st.just(plain), values)
            parts.append(values.map(lambda v, n=name, t=type_: (f"{n} => %s::{t}", (v, None))))
    return st.tuples(*parts).map(lambda chosen: case_of(routine, chosen))


@pytest.fixture(scope="module")
def folder(reachable_dir: Path) -> Path:
    folder = reachable_dir / "fuzzed"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "a.txt").write_text("one two three")
    (folder / "b.md").write_text("# four\n\nfive")
    return folder


@pytest.fixture(scope="module")
def caller(module_db: Database, module_owner: Connection) -> Iterator[Connection]:
    """A role that may ask and load and owns stores, tables of texts and questions; no superuser."""
    name = f"{module_db.name}_fuzzer"
    role = sql.Identifier(name)
    module_owner.execute(sql.SQL("CREATE ROLE {}").format(role))
    module_owner.execute(sql.SQL("GRANT ml_rag_loader, pg_read_server_files TO {}").format(role))
    module_owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(role))
    connection = module_db.connect()
    connection.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(role))
    texts = ["one two three", "two", "three four", "five"]
    rows = [("a", 1, i, text, fake_embedding(text)) for i, text in enumerate(texts)]
    for store in ("docs", "words"):
        # its owner, as no member of ml_rag_user may grant
        create_store_as(connection, store, rows)
    connection.execute("SELECT ml_rag.enable_keyword_search('words')")
    connection.execute(
        "CREATE TABLE texts (id integer PRIMARY KEY, question text, answer jsonb);"
        "INSERT INTO texts VALUES (1, 'one'), (2, ''), (3, NULL);"
        "CREATE TABLE questions (id integer PRIMARY KEY, question text, documents text[]);"
        "INSERT INTO questions VALUES (1, 'one', '{a}'), (2, 'zzz', NULL)"
    )
    # what does not come back by then hangs: a finding, as 57014 is none that these calls may end with
    connection.execute("SET statement_timeout = '20s'; SET client_min_messages = error")
    yield connection
    connection.close()
    module_owner.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(role))
    module_owner.execute(sql.SQL("DROP ROLE {}").format(role))


def create_store_as(connection: Connection, name: str, rows: list[Any]) -> None:
    create_store(connection, name, rows, type="vector(16)", model=None)
    mark(connection, name)


def check(error: psycopg.Error, documented: set[str], case: str) -> None:
    """An error is a documented one, and its text is for the caller."""
    diag = error.diag
    said = f"{diag.sqlstate}: {diag.message_primary} / {diag.message_detail} / {diag.message_hint}\n{case}"
    assert diag.sqlstate is not None, f"the connection broke: {error}\n{case}"
    assert diag.sqlstate in documented, said
    assert not INTERNAL.search(diag.message_primary or ""), said
    assert "Traceback" not in (diag.message_detail or ""), said
    assert len(diag.message_primary or "") < 500, said


class Runner:
    """Runs cases; counts how they ended."""

    def __init__(self, caller: Connection, generator: Generator, takers: list[Routine]) -> None:
        everything = routines(caller)
        self._caller = caller
        self._generator = generator
        self._documented = {r.signature: states(r, everything) for r in takers}
        self._expected = answer(caller, "one two")
        self._cases = 0
        self.ended: Counter[str] = Counter()

    def __call__(self, case: Case, commits: bool = False) -> None:
        """``commits``: outside of a transaction, where a batch routine commits as it goes."""
        commits = commits and case.routine.is_procedure
        self._generator.note(options_of(case.routine, self._generator), case.options)
        try:
            if commits:
                self._caller.execute(case.statement, case.values)
            else:
                with self._caller.transaction(force_rollback=True):
                    self._caller.execute(case.statement, case.values)
            self.ended["ok"] += 1
        except psycopg.Error as error:
            self.ended[error.diag.sqlstate or "none"] += 1
            check(error, self._documented[case.routine.signature], f"{case.statement}\n{str(case.values)[:2000]}")
        finally:
            if commits:
                tidy(self._caller)
        assert self._caller.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        self._cases += 1
        if self._cases % 50 == 0:
            assert answer(self._caller, "one two") == self._expected


def test_whatever_options_a_routine_gets_its_errors_are_the_documented_ones(caller: Connection, folder: Path) -> None:
    generator = Generator(read(caller))
    takers = [r for r in routines(caller) if "options" in r.arguments]
    run = Runner(caller, generator, takers)
    uri = f"file://{folder}/"

    # each option of each routine by itself: all of them, or every so manieth
    sweep = [(r, options) for r in takers for options in generator.sweep(*options_of(r, generator))]
    with fuzzing.target("options", full=len(sweep) + FULL, short=SHORT) as account:
        step = 1 if fuzzing.FULL else len(sweep) // (SHORT // 2)
        for routine, options in sweep[::step]:
            if account.next():
                run(plain_case(routine, options, uri))

        strategies = []
        for routine in takers:
            objects = generator.objects(*options_of(routine, generator))
            strategies.append(cases(routine, uri, st.one_of(objects, objects, objects, ANYTHING, st.none())))

        @fuzzing.examples(account.wanted - account.cases)
        @given(case=st.one_of(strategies), commits=st.integers(0, 3))
        def run_random(case: Case, commits: int) -> None:
            if account.next():
                run(case, commits == 0)

        run_random()
        account.coverage = f"{generator.coverage}, {len(takers)} routines, {run.ended['ok']} calls answered"
    if fuzzing.FULL and account.cases >= account.wanted:
        # heatwave_chat takes its options from a setting
        beyond = {"heatwave_chat", "chat_table", "chat_turn"}
        options = {option.key for name, own in generator.options.items() if name not in beyond for option in own}
        assert options <= generator.reached, options - generator.reached
    if account.cases >= account.wanted:  # and so not where the time was over
        assert run.ended["ok"] > account.cases / 10, run.ended


def tidy(connection: Connection) -> None:
    """Undo what calls outside of a transaction have made."""
    rows = connection.execute(
        "SELECT format('DROP TABLE %I.%I CASCADE', n.nspname, c.relname) FROM pg_class AS c"
        " JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND pg_get_userbyid(c.relowner)"
        " = session_user AND c.relname NOT IN ('docs', 'words', 'texts', 'questions')"
    ).fetchall()
    for (statement,) in rows:
        connection.execute(statement)
    connection.execute("DELETE FROM docs WHERE document_id <> 1; DELETE FROM words WHERE document_id <> 1")
    connection.execute("ALTER TABLE texts DROP COLUMN IF EXISTS made CASCADE")
    connection.execute("UPDATE texts SET answer = NULL WHERE answer IS NOT NULL")
