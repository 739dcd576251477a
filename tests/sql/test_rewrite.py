"""pipeline/rewrite: what is asked becomes what is searched with."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from support import interrupts
from support.cluster import Connection, Database, value_of
from support.scripted import MODEL, Script
from support.scripted import module_script as script
from support.stores import Row, answer, create_store, error, fake_embedding, search, warnings_of

__all__ = ["script"]

#: brief in the catalogue
SMALLEST = "smollm2-135m-instruct"
BIRDS = ["heron", "grebe", "loon", "tern", "gull", "swan", "duck", "coot"]
HISTORY = [{"role": "user", "content": "Who knows the heron?"}, {"role": "assistant", "content": "The grebe does."}]
IN_CONTEXT = "Who knows the heron?\nThe grebe does.\nand the tern?"


@pytest.fixture(scope="module")
def birds(module_db: Database, script: Script) -> Connection:
    """A user's connection to 80 segments of birds' names, with a keyword index."""
    owner = module_db.connect()
    rng = random.Random(11)
    texts = [" ".join(rng.choices(BIRDS, k=rng.randint(2, 6))) for _ in range(80)]
    rows: list[Row] = [(f"d{i:03}", i, 1, text, fake_embedding(text)) for i, text in enumerate(texts)]
    create_store(owner, "docs", rows, type="vector(16)")
    owner.execute("SELECT ml_rag.enable_keyword_search('docs')")
    return module_db.connect("asker")


def rewrite(connection: Connection, question: str | None, **options: Any) -> Any:
    return value_of(connection, "SELECT ml_rag.rewrite(%s, %s)", (question, json.dumps(options)))


def query_of(connection: Connection, question: str, query: dict[str, Any], **options: Any) -> Any:
    """retrieval_info.query of an answer."""
    found = answer(connection, question, {"skip_generate": True, "query_options": query, **options})
    return found["retrieval_info"]["query"]


def ranked(connection: Connection, question: str, **options: Any) -> list[tuple[str, float | None]]:
    """document_name and score, rounded."""
    rows = search(connection, question, {"n_citations": 20, **options})
    return [(row[2], None if row[9] is None else round(row[9], 6)) for row in rows]


# -- without a model ---------------------------------------------------------------------------------------------------


def test_without_query_options_the_output_is_as_ever(birds: Connection, script: Script) -> None:
    before = len(script.requests)
    found = answer(birds, "heron", {"skip_generate": True, "explain": True})
    assert set(found["retrieval_info"]) == {"method", "threshold"}
    assert "query" not in found["explain"]
    assert "rewrite" not in found["explain"]["milliseconds"]
    assert len(script.requests) == before


def test_options_that_ask_for_nothing_change_nothing(birds: Connection, script: Script) -> None:
    before = len(script.requests)
    for nothing in ({}, {"history": []}, {"synonyms": False, "hypothetical_document": None}, {"rewrite": False}):
        assert query_of(birds, "heron", nothing) == {"question": "heron"}
        for arms in ({}, {"keyword_search": True}):
            assert ranked(birds, "heron tern", query_options=nothing, **arms) == ranked(birds, "heron tern", **arms)
    assert len(script.requests) == before


def test_a_history_is_searched_with_beside_the_question_without_any_model(birds: Connection, script: Script) -> None:
    before = len(script.requests)
    found = query_of(birds, "and the tern?", {"history": HISTORY})
    assert found == {"question": "and the tern?", "history": IN_CONTEXT}
    # two parts of equal weight, and where no weight is given 0.4 for meaning in each
    history = {"text": found["history"]}
    for given, weights in (({}, [0.4, 0.6]), ({"semantic_weight": 0.25}, [0.25, 0.75])):
        options: dict[str, Any] = {"keyword_search": True, "hybrid_options": given}
        arms = [
            {"search": "semantic", "weight": weights[0] / 2},
            {"search": "keyword", "weight": weights[1] / 2},
            {"search": "semantic", "weight": weights[0] / 2, "query": history},
            {"search": "keyword", "weight": weights[1] / 2, "query": history},
        ]
        want = ranked(birds, "and the tern?", arms=arms)
        assert ranked(birds, "and the tern?", query_options={"history": HISTORY}, **options) == want
        names = [name for name, _ in ranked(birds, "and the tern?", query_options={"history": HISTORY}, **options)]
        assert names != [name for name, _ in ranked(birds, "and the tern?", **options)]
    assert len(script.requests) == before


def test_explain_tells_of_each_arm(birds: Connection) -> None:
    options = {"keyword_search": True, "query_options": {"history": HISTORY}, "explain": True, "skip_generate": True}
    explained = answer(birds, "and the tern?", options)["explain"]
    assert {"semantic", "keyword", "semantic 2", "keyword 2"} <= set(explained["stores"][0])
    assert explained["stores"][0]["keyword 2"]["words"] != explained["stores"][0]["keyword"]["words"]
    assert explained["milliseconds"]["rewrite"] >= 0
    assert explained["query"] == {"question": "and the tern?", "history": IN_CONTEXT}


def test_a_history_is_cut_to_its_newest_whole_turns(birds: Connection) -> None:
    turns = [{"role": "user", "content": f"{bird} " * 10} for bird in BIRDS]
    whole = query_of(birds, "q tern", {"history": turns, "history_tokens": 100_000})["history"]
    assert whole == "\n".join([*(turn["content"] for turn in turns), "q tern"])
    rng = random.Random(3)
    for _ in range(40):
        budget = rng.randint(0, 200)
        given = query_of(birds, "q tern", {"history": turns, "history_tokens": budget}).get("history", "")
        kept = given.split("\n")[:-1] if given else []
        assert kept == [turn["content"] for turn in turns[len(turns) - len(kept) :]]
        tokens = [len(turn["content"]) // 3 + 1 for turn in turns]
        assert sum(tokens[len(turns) - len(kept) :]) <= budget
        assert len(kept) == len(turns) or sum(tokens[len(turns) - len(kept) - 1 :]) > budget


# -- with a model ------------------------------------------------------------------------------------------------------


def test_the_model_makes_a_question_that_stands_alone(birds: Connection, script: Script) -> None:
    script.answer = {"question": "gull swan"}
    options = {"history": HISTORY, "model_id": MODEL}
    assert query_of(birds, "and the tern?", options) == {"question": "gull swan"}
    assert ranked(birds, "and the tern?", query_options=options) == ranked(birds, "gull swan")
    weighted = {"keyword_search": True, "hybrid_options": {"semantic_weight": 0.4}}
    assert ranked(birds, "and the tern?", query_options=options, keyword_search=True) == ranked(
        birds, "gull swan", **weighted
    )
    assert "Who knows the heron?" in script.prompt
    assert "Question: and the tern?" in script.prompt
    assert list(script.asked) == ["question"]
    # and answers that question
    generated = answer(birds, "and the tern?", {"query_options": options})
    assert generated["text"] == "fake answer to: gull swan [documents: 3]"


def test_one_call_brings_all_that_is_asked_for(birds: Connection, script: Script) -> None:
    script.answer = {
        "question": "heron", "synonyms": ["gull", " swan ", "gull", ""], "hypothetical_document": ["loon tern", "coot"],
        "sub_questions": ["duck?", "grebe?"],
    }  # fmt: skip
    before = len(script.requests)
    asked = {"rewrite": True, "synonyms": 5, "hypothetical_document": 2, "sub_questions": 3, "model_id": MODEL}
    options = {"keyword_search": True, "explain": True, "skip_generate": True, "query_options": asked}
    found = answer(birds, "herron", options)
    assert len(script.requests) == before + 1
    assert list(script.asked) == ["question", "synonyms", "hypothetical_document", "sub_questions"]
    assert found["retrieval_info"]["query"] == {
        "question": "heron", "synonyms": ["gull", "swan"], "hypothetical_document": ["loon tern", "coot"],
        "sub_questions": ["duck?", "grebe?"],
    }  # fmt: skip
    told = found["explain"]["query"]
    assert told["model_id"] == MODEL
    assert told["tokens"]["prompt"] > 0
    assert told["tokens"]["generated"] > 0
    assert found["explain"]["milliseconds"]["rewrite"] > 0
    arms = [arm for arm in found["explain"]["stores"][0] if arm.startswith(("semantic", "keyword"))]
    assert sorted(arms) == sorted(
        ["semantic", "semantic 2", "semantic 3", *(f"keyword{n}" for n in ("", " 2", " 3", " 4"))]
    )


def test_synonyms_are_a_keyword_arm_of_a_small_weight(birds: Connection, script: Script) -> None:
    script.answer = {"synonyms": ["gull", "swan"]}
    options = {"keyword_search": True, "hybrid_options": {"semantic_weight": 0.4}}
    arms = [
        {"search": "semantic", "weight": 0.36},
        {"search": "keyword", "weight": 0.54},
        {"search": "keyword", "weight": 0.1, "query": {"text": "gull swan"}},
    ]
    got = ranked(birds, "heron", query_options={"synonyms": True, "model_id": MODEL}, **options)
    assert got == ranked(birds, "heron", arms=arms)
    assert script.asked["synonyms"]["maxItems"] == 8


def test_a_hypothetical_document_stands_beside_the_question(birds: Connection, script: Script) -> None:
    script.answer = {"hypothetical_document": "gull swan gull"}
    query = {"hypothetical_document": True, "model_id": MODEL}
    mean = [(a + b) / 2 for a, b in zip(fake_embedding("heron"), fake_embedding("gull swan gull"), strict=True)]
    want = ranked(birds, "heron", arms=[{"search": "semantic", "query_embedding": mean}])
    assert [name for name, _ in ranked(birds, "heron", query_options=query)] == [name for name, _ in want]
    # its distances are those to the question
    found = answer(birds, "heron", {"query_options": query, "skip_generate": True, "n_citations": 50})
    own = answer(birds, "heron", {"skip_generate": True, "n_citations": 100})
    distances = {c["document_name"]: c["distance"] for c in own["citations"]}
    assert all(distances[c["document_name"]] == c["distance"] for c in found["citations"])


def test_sub_questions_are_searched_beside_the_question(birds: Connection, script: Script) -> None:
    script.answer = {"sub_questions": ["gull", "swan", "duck", "tern"]}
    query = {"sub_questions": 3, "model_id": MODEL}
    arms = [{"search": "semantic", "weight": 0.25}] + [
        {"search": "semantic", "weight": 0.25, "query": {"text": text}} for text in ("gull", "swan", "duck")
    ]
    assert ranked(birds, "heron", query_options=query) == ranked(birds, "heron", arms=arms)


def test_an_arm_may_name_what_it_searches_with(birds: Connection, script: Script) -> None:
    script.answer = {
        "synonyms": ["gull", "swan"],
        "hypothetical_document": "loon coot",
        "sub_questions": ["duck", "tern"],
    }
    query = {"synonyms": 2, "hypothetical_document": 1, "sub_questions": 2, "model_id": MODEL}
    arms = [
        {"search": "keyword", "query": "synonyms", "weight": 0.2},
        {"search": "semantic", "weight": 0.3},
        {"search": "semantic", "query": "sub_questions", "weight": 0.4},
        {"search": "keyword", "query": "hypothetical_document", "weight": 0.1},
    ]
    want = [
        {"search": "keyword", "query": {"text": "gull swan"}, "weight": 0.2},
        {"search": "semantic", "weight": 0.3},
        {"search": "semantic", "query": {"text": "duck"}, "weight": 0.2},
        {"search": "semantic", "query": {"text": "tern"}, "weight": 0.2},
        {"search": "keyword", "query": {"text": "heron loon coot"}, "weight": 0.1},
    ]
    assert ranked(birds, "heron", query_options=query, arms=arms) == ranked(birds, "heron", arms=want)


def test_instructions_of_the_callers(birds: Connection, script: Script) -> None:
    script.answer = {
        "question": "heron",
        "synonyms": ["gull"],
        "hypothetical_document": "loon",
        "sub_questions": ["tern"],
    }
    asked = {"rewrite": True, "synonyms": 3, "hypothetical_document": 1, "sub_questions": 2, "model_id": MODEL}
    answer(birds, "heron", {"query_options": asked, "skip_generate": True})
    plain, schema = script.prompt, script.asked
    prompts = {
        "rewrite": "the question in the words of a falconer",
        "synonyms": "Latin names\nof {n} birds",
        "hypothetical_document": "a page of a field guide",
        "sub_questions": "questions about plumage",
    }
    found = answer(birds, "heron", {"query_options": {**asked, "prompts": prompts}, "skip_generate": True})
    assert found["retrieval_info"]["query"]["synonyms"] == ["gull"]
    assert script.asked == schema
    assert script.prompt.splitlines()[-4:] == [
        "- question: one question as a text. the question in the words of a falconer",
        "- synonyms: at most 3 terms or short phrases. Latin names of {n} birds",
        "- hypothetical_document: 1 passage(s). a page of a field guide",
        "- sub_questions: at most 2 questions. questions about plumage",
    ]
    one = {**asked, "prompts": {"synonyms": prompts["synonyms"], "rewrite": None}}
    answer(birds, "heron", {"query_options": one, "skip_generate": True})
    changed = [a != b for a, b in zip(script.prompt.splitlines(), plain.splitlines(), strict=True)]
    assert changed[-4:] == [False, True, False, False]
    for bad in ({"synonyms": " "}, {"synonyms": 1}, {"filters": "x"}, {"rewrite": "x" * 8193}, "x"):
        with error("22023"):
            answer(birds, "heron", {"query_options": {**asked, "prompts": bad}, "skip_generate": True})


def test_a_hypothetical_document_may_be_searched_with_alone(birds: Connection, script: Script) -> None:
    script.answer = {"hypothetical_document": ["loon coot", "tern gull"]}
    query = {"hypothetical_document": 2, "model_id": MODEL}
    arm = {"search": "semantic", "query": "hypothetical_document"}
    mean = [(a + b) / 2 for a, b in zip(fake_embedding("loon coot"), fake_embedding("tern gull"), strict=True)]
    want = [name for name, _ in ranked(birds, "heron", arms=[{"search": "semantic", "query_embedding": mean}])]
    alone = ranked(birds, "heron", query_options=query, arms=[{**arm, "alone": True}])
    beside = ranked(birds, "heron", query_options=query, arms=[{**arm, "alone": False}])
    assert [name for name, _ in alone] == want != [name for name, _ in beside]
    words = {"search": "keyword", "query": "hypothetical_document", "alone": True}
    want = ranked(birds, "heron", arms=[{"search": "keyword", "query": {"text": "loon coot tern gull"}}])
    assert ranked(birds, "heron", query_options=query, arms=[words]) == want


def test_an_arm_cannot_search_with_what_was_not_asked_for(birds: Connection) -> None:
    arms = [{"search": "keyword", "query": "synonyms"}]
    with error("22023", '"query"', '"query_options": {"synonyms": true}'):
        answer(birds, "heron", {"arms": arms})
    with error("22023", '"query"'):
        answer(birds, "heron", {"arms": arms, "query_options": {"sub_questions": 1}})


def test_the_setting_names_the_model_and_turns_rewriting_on(
    module_db: Database, birds: Connection, script: Script
) -> None:
    owner = module_db.connect()
    owner.execute("SELECT ml_rag.configure('query_model_id', %s)", (MODEL,))
    try:
        script.answer = {"question": "gull"}
        assert rewrite(birds, "and?", history=HISTORY) == {"question": "gull"}
        assert "history" in rewrite(birds, "and?", history=HISTORY, rewrite=False)
        # nothing asks for a model
        assert rewrite(birds, "and?") == {"question": "and?"}
    finally:
        owner.execute("SELECT ml_rag.configure('query_model_id', NULL)")
    assert "history" in rewrite(birds, "and?", history=HISTORY)


def test_the_model_sees_the_newest_turns_that_fit_and_always_the_question(birds: Connection, script: Script) -> None:
    script.answer = {"question": "gull"}
    turns = [{"role": "user", "content": f"{i} " + "word " * 40} for i in range(30)]
    for tokens in (0, 100, 400, 900, 3000, None):
        budget = {} if tokens is None else {"history_tokens": tokens}
        rewrite(birds, "the question", history=turns, model_id=MODEL, **budget)
        kept = [int(line.split()[1]) for line in script.prompt.splitlines() if line.startswith("user: ")]
        assert kept == list(range(30 - len(kept), 30))
        assert "Question: the question" in script.prompt
        assert script.requests[-1]["messages"][0]["role"] == "system"
        assert len(kept) == 30 if tokens == 3000 else len(kept) < 30
        assert kept or tokens in (0, 100)


# -- what goes wrong ---------------------------------------------------------------------------------------------------

NONSENSE = [
    "", "no JSON", "[1]", "null", "{}", '{"question": 1}', '{"question": ""}', '{"question": "  "}',
    '{"question": ["a", "b"]}',
    '{"question": null}', json.dumps({"question": "x" * 2001}), '{"question": "cut', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda text: text[:20])
def test_nonsense_falls_back_to_the_question_as_asked(birds: Connection, script: Script, nonsense: str) -> None:
    script.answer = nonsense
    query = {"rewrite": True, "model_id": MODEL, "history": HISTORY}
    with warnings_of(birds) as told:
        found = query_of(birds, "and the tern?", query)
    assert found == {"question": "and the tern?", "history": IN_CONTEXT}
    assert [message for *_, message in told] == ["the search uses the question as it was asked"]
    with error("38000", "cannot be used"):
        answer(birds, "and the tern?", {"query_options": {**query, "fallback": False}})


def test_arms_that_have_nothing_to_search_with_are_left_out(birds: Connection, script: Script) -> None:
    script.answer = "nonsense"
    query = {"synonyms": 3, "sub_questions": 2, "model_id": MODEL}
    arms = [{"search": "keyword", "query": "synonyms"}, {"search": "semantic", "query": "sub_questions"}]
    with warnings_of(birds):
        assert ranked(birds, "heron", query_options=query, arms=arms) == ranked(
            birds, "heron", arms=[{"search": "keyword"}]
        )
        assert ranked(birds, "heron", query_options=query, arms=[*arms, {"search": "semantic"}]) == ranked(
            birds, "heron"
        )


def test_a_model_that_fails_is_a_warning_or_the_error(birds: Connection, script: Script) -> None:
    query = {"rewrite": True, "model_id": "fake-generate-error"}
    with warnings_of(birds) as told:
        assert query_of(birds, "heron", query) == {"question": "heron"}
    assert [message for *_, message in told] == ["the search uses the question as it was asked"]
    with error("38000", "the fake model failed"):
        answer(birds, "heron", {"query_options": {**query, "fallback": False}})


@pytest.mark.parametrize(
    ("model", "why", "other"),
    [
        (SMALLEST, "is too small to", "larger one"),
        ("extractive", "only takes sentences out of documents, and cannot", "language model"),
    ],
)
@pytest.mark.parametrize("asked", [{"rewrite": True}, {"synonyms": 3}, {"filters": ["document_name"]}])
def test_models_that_cannot_write_are_not_asked(
    birds: Connection, script: Script, asked: dict[str, Any], model: str, why: str, other: str
) -> None:
    """The warning names a model that is there."""
    before, told = len(script.requests), []
    birds.add_notice_handler(lambda d: told.append((d.message_primary, d.message_detail, d.message_hint)))
    query = {**asked, "model_id": model}
    assert query_of(birds, "and the tern?", query) == {"question": "and the tern?"}
    assert told == [
        (
            "the search uses the question as it was asked",
            f"Model {model} {why} rewrite questions.",
            f'Name a {other} in "model_id", such as {MODEL}.'
            + (' Or give the conditions yourself, in option "filters".' if "filters" in asked else ""),
        )
    ]
    with error("55000", f"model {model} {why}", f"such as {MODEL}."):
        answer(birds, "and the tern?", {"query_options": {**query, "fallback": False}})
    assert len(script.requests) == before


def test_a_larger_model_is_named_with_the_command_that_gets_it(owner: Connection, asker: Connection) -> None:
    create_store(owner, "docs", [("a", 1, 1, "heron", fake_embedding("heron"))], type="vector(16)")
    with error("55000") as caught:
        answer(asker, "heron", {"query_options": {"rewrite": True, "model_id": SMALLEST, "fallback": False}})
    assert caught.hint.startswith(
        'Name a larger one in "model_id", such as qwen2.5-7b-instruct, after '
        '"ml-rag models pull qwen2.5-7b-instruct --models-dir /'
    )


@pytest.mark.parametrize("model", ["no-such-model", "fake-embed"])
def test_a_model_that_is_none_is_an_error(birds: Connection, model: str) -> None:
    with error("22023", model):
        answer(birds, "heron", {"query_options": {"rewrite": True, "model_id": model}})


def test_a_question_that_does_not_fit_the_model_is_searched_with(birds: Connection) -> None:
    with warnings_of(birds) as told:
        query_of(birds, "heron " * 100_000, {"synonyms": 1, "model_id": MODEL})
    assert [message for *_, message in told] == ["the search uses the question as it was asked"]


def test_a_null_character_cannot_come_in(birds: Connection, script: Script) -> None:
    script.answer = {"question": "gu\x00ll \ud800"}
    assert rewrite(birds, "q", rewrite=True, model_id=MODEL) == {"question": "gull ?"}


@pytest.mark.parametrize("way", interrupts.WAYS)
def test_the_stage_is_interrupted_at_once(
    module_owner: Connection, module_db: Database, birds: Connection, script: Script, way: str
) -> None:
    session = module_db.connect("asker")
    query = {"hypothetical_document": 4, "synonyms": 20, "model_id": MODEL}
    answer(session, "heron", {"skip_generate": True})
    script.answer = lambda body: time.sleep(3) or ""  # type: ignore[func-returns-value]
    late = interrupts.seconds_late(
        session, module_owner, way, lambda: answer(session, "heron", {"query_options": query})
    )
    assert late < interrupts.GRACE_SECONDS


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "name", "allowed"),
    [
        ({"synonyms": 0}, "synonyms", "1 to 20"),
        ({"synonyms": 21}, "synonyms", "1 to 20"),
        ({"synonyms": 1.5}, "synonyms", "1 to 20"),
        ({"synonyms": "many"}, "synonyms", "1 to 20"),
        ({"hypothetical_document": 5}, "hypothetical_document", "1 to 4"),
        ({"hypothetical_document": [1]}, "hypothetical_document", "1 to 4"),
        ({"sub_questions": 6}, "sub_questions", "1 to 5"),
        ({"history": ["a"]}, "history", "role"),
        ({"history": [{"role": "system", "content": "a"}]}, "history", "role"),
        ({"history": [{"role": "user"}]}, "history", "role"),
        ({"history": [{"role": "user", "content": 1}]}, "history", "role"),
        ({"history": [{"role": "user", "content": "a", "name": "b"}]}, "history", "role"),
        ({"history": [{"role": "user", "content": "a"}] * 1001}, "history", "1000"),
    ],
    ids=str,
)
def test_bad_options_are_refused(birds: Connection, query: Any, name: str, allowed: str) -> None:
    with error("22023", f'"{name}"', allowed):
        answer(birds, "heron", {"query_options": query})
    with error("22023", f'"{name}"', allowed):
        rewrite(birds, "heron", **query)


def test_limits_of_the_options_are_taken(birds: Connection, script: Script) -> None:
    script.answer = {"synonyms": ["a"] * 3, "hypothetical_document": ["b"], "sub_questions": ["c"]}
    for n in ({"synonyms": 1}, {"synonyms": 20}, {"hypothetical_document": 4}, {"sub_questions": 5}):
        assert rewrite(birds, "heron", model_id=MODEL, **n)["question"] == "heron"
    assert rewrite(birds, "heron", history=[HISTORY[0]] * 1000, history_tokens=8)["question"] == "heron"


def test_what_users_have_said_is_not_repeated_in_errors(birds: Connection) -> None:
    with error("22023", "an array of 1") as caught:
        rewrite(birds, "q", history=[{"role": "user", "text": "secret"}])
    assert "secret" not in caught.detail


@pytest.mark.parametrize("question", [None, "", "  "])
def test_an_empty_question_is_refused(birds: Connection, question: str | None) -> None:
    with error("22023", "empty"):
        rewrite(birds, question)


def test_the_fake_model_repeats_the_question(birds: Connection) -> None:
    options = {
        "rewrite": True,
        "synonyms": 3,
        "hypothetical_document": 1,
        "sub_questions": 2,
        "model_id": "fake-generate",
    }
    assert rewrite(birds, "what about the tern?", **options) == {"question": "what about the tern?"}


def test_tables_of_questions_take_query_options(module_db: Database, birds: Connection, script: Script) -> None:
    script.answer = {"question": "gull"}
    owner = module_db.connect()
    owner.execute(
        "CREATE TABLE asked (id integer PRIMARY KEY, question text); INSERT INTO asked VALUES (1, 'a'), (2, 'b')"
    )
    options = {"skip_generate": True, "query_options": {"rewrite": True, "model_id": MODEL}}
    owner.execute("CALL ml_rag_table('public.asked.question', 'public.asked.answer', %s)", (json.dumps(options),))
    rows = owner.execute("SELECT answer::jsonb #>> '{retrieval_info,query,question}' FROM asked ORDER BY id").fetchall()
    assert rows == [("gull",), ("gull",)]
    evaluated = value_of(
        owner,
        "SELECT ml_rag_evaluate('SELECT id, question FROM asked', %s)",
        (json.dumps({"options": {"query_options": options["query_options"]}, "keep": False}),),
    )
    assert evaluated["errors"] == {}
    assert "rewrite" in evaluated["latency"]
