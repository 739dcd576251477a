"""``make eval``: the search on every data set there is, arm by arm, held against the figures it has to reach.

Needs a server with the extension and a model server with the real embedding model; ``make eval`` starts the private
ones. The sets are the folders of ``--data`` (or that folder itself); a database of its own keeps their stores, so that
only the first time costs the embedding.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table

from bench import extractive, grounding, made, nlsql, nodes, parts, questions, rows, tables
from bench.common import machine, own_database
from bench.recorded import recorded_server, served
from ml_rag.client import datasets
from ml_rag.client.datasets import Dataset, Question
from ml_rag.client.eval import measure, table, write
from ml_rag.client.evaluation import ARMS, Evaluation, connect
from ml_rag.errors import InvalidRequest
from ml_rag.server.catalogue import load_catalogue, models_dir
from ml_rag.work import Work

HERE = Path(__file__).parent
DATABASE = "ml_rag_evaluation"
CUTOFFS = [1, 3, 5, 10]

#: letters of a language that has no blanks between words, or letters of its own
SCRIPTS = {"ja": "[\u3040-\u30ff]", "ko": "[\uac00-\ud7af]", "zh": "[\u4e00-\u9fff]"}


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that has to be reached. ``value`` is null where it could not be measured."""

    name: str
    dataset: str
    value: float | None
    limit: str
    reached: bool | None


def language(dataset: Dataset) -> str:
    """The language of the questions by their letters: ja, ko, zh, else en."""
    text = "".join(question.text for question in dataset.questions[:200])
    for code, letters in SCRIPTS.items():
        if len(re.findall(letters, text)) > len(text) / 10:
            return code
    return "en"


def ndcg(ranking: Sequence[str], grades: Mapping[str, float], k: int = 10) -> float:
    """nDCG@k of one question, gain = grade, discount log2(rank + 1)."""

    def total(gains: Sequence[float]) -> float:
        return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:k]))

    return total([max(0.0, grades.get(name, 0)) for name in ranking]) / total(
        sorted((max(0.0, grade) for grade in grades.values()), reverse=True)
    )


def _page(document: str, page: object) -> str:
    return document if page is None else f"{document}#page={page}"


def _grades(question: Question) -> dict[str, float]:
    return {_page(d["document"], d.get("page")): d.get("grade", 1) for d in question.documents}


def bm25s_ndcg(connection: psycopg.Connection[Any], evaluation: Evaluation) -> float:
    """Mean nDCG@10 of the library bm25s over the same segments and the same tokens."""
    import bm25s

    questions = [question for question in evaluation.dataset.questions if question.documents]
    with_pages = any("page" in d for question in questions for d in question.documents)
    store = sql.Identifier(*evaluation.store.split("."))
    configuration, k1, b = connection.execute(
        "SELECT configuration::regconfig::oid, k1, b FROM ml_rag.keyword_index WHERE store = %s::regclass",
        (evaluation.store,),
    ).fetchone() or (None, None, None)
    tokens = "ARRAY(SELECT t.token FROM ml_rag.keyword_tokens({}::oid::regconfig, {}) AS t, generate_series(1, t.n))"
    tokens_of = sql.SQL(tokens).format(sql.Literal(configuration), sql.SQL("x.text"))
    query = sql.SQL(
        "SELECT document_name, metadata ->> 'page', {} FROM (SELECT *, segment AS text FROM {}) AS x"
        ' ORDER BY document_name COLLATE "C", document_id, segment_number'
    ).format(tokens_of, store)
    rows = connection.execute(query).fetchall()
    names = [_page(name, page if with_pages else None) for name, page, _ in rows]
    query = sql.SQL("SELECT {} FROM unnest(%s::text[]) WITH ORDINALITY AS x (text, place) ORDER BY place").format(
        tokens_of
    )
    asked = [row[0] for row in connection.execute(query, ([question.text for question in questions],))]
    index = bm25s.BM25(method="lucene", k1=k1, b=b)
    index.index([row[2] for row in rows], show_progress=False)
    found = []
    for question, words in zip(questions, asked, strict=True):
        known = [word for word in words if word in index.vocab_dict]
        scores = index.get_scores(known) if known else np.zeros(len(rows))
        order = [i for i in np.argsort(-scores, kind="stable")[:200] if scores[i] > 0]
        found.append(ndcg(list(dict.fromkeys(names[i] for i in order)), _grades(question)))
    return float(np.mean(found))


def _value(result: dict[str, Any], arm: str, name: str = "ndcg@10") -> float | None:
    measures = result["arms"].get(arm, {}).get("measures") or {}
    value: float | None = measures.get(name)
    return value


def checks(connection: psycopg.Connection[Any], evaluation: Evaluation, result: dict[str, Any]) -> Iterator[Check]:
    """The checks of the figures that one set has."""
    name = result["name"]
    vector, exact, text, hybrid = (_value(result, arm) for arm in ("vector", "exact", "text", "hybrid"))
    if vector is not None and exact is not None:
        change = round(vector - exact, 6)
        yield Check("semantic, HNSW against exact, nDCG@10", name, change, "within 0.005", abs(change) <= 0.005)
    if text is not None:
        other = bm25s_ndcg(connection, evaluation)
        result["bm25s"] = {"ndcg@10": round(other, 6)}
        change = round(text - other, 6) + 0.0  # no -0
        yield Check("keyword against bm25s, nDCG@10", name, change, "within 0.005", abs(change) <= 0.005)
    if hybrid is not None and vector is not None and text is not None:
        change = round(hybrid - max(vector, text), 6)
        yield Check("hybrid against the better arm, nDCG@10", name, change, "≥ -0.01", change >= -0.01)
    if hybrid is not None and name == "squad2":
        yield Check("hybrid, nDCG@10", name, hybrid, "≥ 0.90", hybrid >= 0.9)
    if name == "northwind":
        yield from _northwind(connection, evaluation, result)


def _northwind(connection: psycopg.Connection[Any], evaluation: Evaluation, result: dict[str, Any]) -> Iterator[Check]:
    query = "SELECT document_name, segment FROM ml_rag_search(%s, %s)"

    def found(question: str, arm: str) -> list[tuple[str, str]]:
        options = {**ARMS[arm].options, "vector_store": [evaluation.store]}
        return connection.execute(query, (question, psycopg.types.json.Jsonb(options))).fetchall()

    ran = [arm for arm, run in result["arms"].items() if "missing" not in run and arm != "exact"]
    for arm in ran:
        ranks = [i for i, (_, segment) in enumerate(found("what plan costs $45.00?", arm), 1) if "$45.00" in segment]
        must = arm in ("hybrid", "ranker")
        yield Check(
            f"what plan costs $45.00?: rank of a segment with $45.00, {ARMS[arm].title}", "northwind",
            ranks[0] if ranks else None, "1" if must else "(none)", ranks[:1] == [1] if must else None,
        )  # fmt: skip
    for arm in ran:
        names = [name for name, _ in found("learning about underwater activities", arm)]
        rank = names.index("PerksPlus.pdf") + 1 if "PerksPlus.pdf" in names else None
        limit = {"hybrid": 3, "ranker": 1}.get(arm)
        yield Check(
            f"learning about underwater activities: rank of PerksPlus.pdf, {ARMS[arm].title}", "northwind", rank,
            f"≤ {limit}" if limit else "(none)", rank is not None and rank <= limit if limit else None,
        )  # fmt: skip
    for arm in ran:
        value = _value(result, arm, "recall@3")
        must = arm in ("hybrid", "ranker")
        yield Check(
            f"file and page among the first three, {ARMS[arm].title}", "northwind", value,
            "≥ 0.78" if must else "(none)", value is not None and value >= 0.78 if must else None,
        )  # fmt: skip


def _questions_about_tables(connection: psycopg.Connection[Any], folder: Path) -> tuple[list[Check], dict[str, Any]]:
    questions, measured = nlsql.measure(connection, folder)
    found = []

    def check(name: str, share: float | None, must: float | None) -> None:
        limit = "(none)" if must is None else "all" if must == 1 else f"≥ {must}"
        reached = None if must is None else share is not None and share >= must
        found.append(Check(name, "nlsql", share, limit, reached))

    for name, model, must in (
        ("recorded statements", measured.recorded, 1.0),
        ("the small model that comes with the product", measured.small, None),
    ):
        check(f"the right rows, {name}", nlsql.share(model, questions, {"right"}, answerable=True), must)
        refused = nlsql.share(model, questions, {"right", "refused"}, answerable=False)
        check(f"unanswerable questions refused, {name}", refused, 1.0)
        harmless = 1 - sum(outcome.startswith(("wrong", "error")) for outcome in model.values()) / len(questions)
        check(f"neither wrong rows nor an error, {name}", harmless, 1.0)
    check("needed tables among the first 8", measured.tables, 0.95)
    return found, asdict(measured)


def question_checks(
    connection: psycopg.Connection[Any], evaluation: Evaluation, data: Path, console: Console, work: Work
) -> Iterator[Check]:
    """The figures of the question's side, on Northwind, with a recorded model."""
    found = questions.chats(connection, evaluation.store, data)
    for way, limit in (("as asked", None), ("no model", 0.80), ("recorded rewriting", 0.93)):
        value = round(found[way][0], 4)
        name = f"conversations, right page among the first three, {way}"
        reached = None if limit is None else value >= limit
        yield Check(name, "northwind", value, f"≥ {limit}" if limit else "(none)", reached)
    changed = round(found["recorded rewriting"][1], 4)
    yield Check("the same where the topic changes, recorded rewriting", "northwind", changed, "≥ 0.9", changed >= 0.9)
    own = round(statistics.mean(questions.named(connection, evaluation.store, questions.NAMED)), 4)
    yield Check("documents named or not, 60 questions of our own", "northwind", own, "≥ 0.95", own >= 0.95)
    named, alone = questions.named(connection, evaluation.store, data / "northwind" / "structured.jsonl")
    yield Check("documents that a question names, found", "northwind", named, "1", named == 1)
    yield Check("questions that only seem to name one, left alone", "northwind", alone, "1", alone == 1)
    evaluation.ask([question for question in evaluation.dataset.questions if question.documents])
    with work.task("northwind: simple against advanced") as task:
        measured = questions.lines(connection, evaluation, task.tell)
    console.print(questions.table(measured))
    console.print()
    gain = round(questions.gain(measured), 4)
    yield Check("the best advanced line against hybrid, nDCG@10", "northwind", gain, "≥ 0.02", gain >= 0.02)
    for line in (measured["+ synonyms"], measured["+ synonyms, abstain"]):
        match, p = round(line.match, 4), 1.0 if line.p_value is None else line.p_value
        yield Check(f"{line.title}: questions with a right citation", "northwind", match, "≥ 0.88", match >= 0.88)
        yield Check(f"{line.title}: p of its difference to hybrid", "northwind", p, "< 0.05", p < 0.05)


def merge_checks(
    connection: psycopg.Connection[Any], evaluation: Evaluation, store: str, console: Console, work: Work
) -> Iterator[Check]:
    """What enrichment that is merged into the words adds, on Northwind by page, with a recorded model."""
    with work.task("northwind by page: merged enrichment") as task:
        found = nodes.merged(connection, evaluation, store, task.tell)
    console.print(nodes.table("northwind by page: enrichment merged into the words (recorded model)", found))
    console.print()
    # with stemming the pages' own words find almost all of it: docs/nodes.md
    change = round(found["beginnings, hybrid"][0] - max(found["beginnings, dense"][0], found["text only"][0]), 4)
    yield Check("whole pages, hybrid against the better arm, nDCG@10", "northwind", change, "≥ -0.02", change >= -0.02)
    gain = round(found["hybrid, merged enrichment"][0] - found["hybrid"][0], 4)
    yield Check("by page: hybrid with merged enrichment against hybrid, nDCG@10", "northwind", gain, "(none)", None)


def sentence_checks(
    connection: psycopg.Connection[Any], evaluation: Evaluation, console: Console, work: Work
) -> Iterator[Check]:
    """Sentences searched and their segments cited, against segments searched."""
    name = evaluation.dataset.name
    evaluation.ask([question for question in evaluation.dataset.questions if question.documents])
    with work.task(f"{name}: sentences") as task:
        found = nodes.sentences(connection, evaluation, task.tell)
    console.print(nodes.table(f"{name}: sentences", found))
    console.print()
    for line, (ndcg_10, _) in found.items():
        yield Check(f"{line}, nDCG@10", name, round(ndcg_10, 4), "(none)", None)


def rerank_checks(connection: psycopg.Connection[Any], evaluation: Evaluation) -> Iterator[Check]:
    """The ranking model hybrid over what hybrid search has found."""
    name = evaluation.dataset.name
    plain, ranked, taken = parts.reranked(connection, evaluation)
    change = round(ranked - plain, 4)
    yield Check("reranked by hybrid against its search, nDCG@10", name, change, "≥ 0", change >= 0)
    yield Check("rerank by hybrid, 50 candidates, ms", name, round(taken, 1), "≤ 15", taken <= 15)


def node_checks(connection: psycopg.Connection[Any], evaluation: Evaluation) -> Iterator[Check]:
    """Three sentences as hits, against as many tokens of segments."""
    name = evaluation.dataset.name
    for what, share in zip(("sentences", "segments"), parts.answers_in_nodes(connection, evaluation), strict=True):
        yield Check(
            f"an answer stands in 3 sentences, or as many tokens: {what}", name, round(share, 4), "(none)", None
        )


def embedding_checks(connection: psycopg.Connection[Any], pair: Sequence[Dataset], work: Work) -> Iterator[Check]:
    """Two embeddings of a store of two languages in one search."""
    both = parts.two_languages(*pair)
    evaluation = Evaluation(connection, both, "ml_rag_eval", {"language": "en", "ocr": None})
    with work.task(f"{both.name}: documents") as task:
        evaluation.load(task.tell)
    parts.add_embedding(connection, evaluation.store)
    for dataset in pair:
        found = dict(parts.embeddings(evaluation, dataset.name))
        for title, value in found.items():
            yield Check(f"embedding {title}, nDCG@10", f"{both.name}: {dataset.name}", round(value, 4), "(none)", None)
        change = round(found.pop("both") - max(found.values()), 4)
        title = "two embeddings in one search against the better one, nDCG@10"
        yield Check(title, f"{both.name}: {dataset.name}", change, "≥ -0.01", change >= -0.01)


def extractive_checks(connection: psycopg.Connection[Any], evaluation: Evaluation, work: Work) -> Iterator[Check]:
    """The figures of answers without a language model."""
    name = evaluation.dataset.name
    with work.task(f"{name}: extractive answers") as task:
        found = extractive.measure(connection, evaluation, task.tell)
    is_english = name == "squad2"
    for sentences, share, least in (("one sentence", found.one, 0.78), ("two sentences", found.two, 0.86)):
        limit, reached = (f"≥ {least}", share >= least) if is_english else ("(none)", None)
        yield Check(f"extractive, a right answer stands in {sentences}", name, round(share, 4), limit, reached)
    yield Check("extractive, answerable questions refused", name, round(found.wrongly_refused, 4), "(none)", None)
    if found.refused is not None:
        yield Check("extractive, unanswerable questions refused", name, round(found.refused, 4), "(none)", None)
    milliseconds = round(found.milliseconds, 1)
    yield Check("extractive, ms beyond the search", name, milliseconds, "≤ 150", milliseconds <= 150)
    stored = round(extractive.milliseconds_stored(connection, evaluation), 1)
    yield Check("the same, sentences kept as a node group", name, stored, "≤ 20", stored <= 20)
    title = f"extractive, sentences of {found.answers} answers that stand in no citation"
    yield Check(title, name, found.invented, "0", found.invented == 0)
    if is_english and extractive.is_here(connection, extractive.SMALL_MODEL):
        for model, (share, seconds) in extractive.beside(connection, evaluation).items():
            title = f"{model}, a right answer in the text, {extractive.BESIDE} questions, {seconds:.2g} s each"
            yield Check(title, name, round(share, 4), "(none)", None)


def abstain_checks(connection: psycopg.Connection[Any], evaluation: Evaluation) -> Iterator[Check]:
    """What a limit refuses that was kept on one half of the questions, measured on the other."""
    name, options = evaluation.dataset.name, {"vector_store": [evaluation.store], "keyword_search": True}
    found: list[tuple[float, float, float]] = []
    for half, more in ((0, {"keep": True}), (1, {"retrieval_options": {"max_distance": "auto"}})):
        connection.execute("CREATE TEMP TABLE asked (question text, answerable boolean)")
        with connection.cursor().copy("COPY asked FROM STDIN") as copy:
            for answerable in (True, False):
                for question in extractive.shuffled(evaluation.dataset.questions, answerable=answerable)[half::2]:
                    copy.write_row((question.text, answerable))
        query = (
            "SELECT threshold::float8, refused_wrongly, 1 - answered_wrongly, is_proposed FROM ml_rag.calibrate(%s, %s)"
        )
        rows = connection.execute(query, ("asked", Jsonb({**options, **more}))).fetchall()
        found = [row[:3] for row in rows]
        if half == 0:
            (kept,) = [row[0] for row in rows if row[3]]
        connection.execute("DROP TABLE asked")
    for most in (0.05, 0.08, 0.1, 0.15, 0.2):
        best = round(max((refused for _, wrongly, refused in found if wrongly <= most), default=0), 4)
        must = ("> 0.15", best > 0.15) if most == 0.1 else ("(none)", None)
        yield Check(f"unanswerable questions refused at {most:.0%} wrong refusals", name, best, *must)
    ((_, wrongly, refused),) = [row for row in found if row[0] == kept]
    title = f"unanswerable questions refused by the limit kept, {kept}, which refuses {wrongly:.1%} wrongly"
    yield Check(title, name, round(refused, 4), "(none)", None)


def grounding_checks(connection: psycopg.Connection[Any], folder: Path, work: Work) -> Iterator[Check]:
    """The figures of ml_check_grounding."""
    with work.task("grounding") as task:
        found = list(grounding.measure(connection, folder, task.tell))
    for name, title, whole, half, least in found:
        yield Check(
            f"grounding, {title}: area under the ROC curve", name, round(whole, 4), f"≥ {least}", whole >= least
        )
        yield Check(f"grounding, {title}: of the half not chosen on", name, round(half, 4), "(none)", None)
    texts = [fact for row in (folder / "swaps.jsonl").open(encoding="utf-8") for fact in json.loads(row)["facts"]]
    taken = round(grounding.milliseconds(connection, texts), 1)
    yield Check("grounding, ms of a check of 5 sentences by 3 citations", "swaps", taken, "≤ 100", taken <= 100)


def shop_checks(connection: psycopg.Connection[Any], data: Path) -> Iterator[Check]:
    """The figures of filters that a recorded model has chosen."""
    store = questions.load_shop(connection, data, "ml_rag_eval")
    broken, share = questions.shop(connection, store, data)
    yield Check("rows that break a recorded condition", "shop", broken, "0", broken == 0)
    yield Check("expected rows among the first 20", "shop", round(share, 4), "≥ 0.98", share >= 0.98)
    broken, share = questions.shop(connection, store, data, filters=True)
    yield Check("rows that break a condition, nothing described", "shop", broken, "0", broken == 0)
    yield Check("expected rows, nothing described", "shop", round(share, 4), "≥ 0.95", share >= 0.95)


def rows_checks(connection: psycopg.Connection[Any], data: Path) -> Iterator[Check]:
    """The figures of the shop with a vectorizer."""
    measured = rows.measure(connection, data, "ml_rag_eval")
    yield Check(
        "vectorized, rows that break a condition given", "shop", measured["broken"], "0", measured["broken"] == 0
    )
    share = round(measured["found"], 4)
    yield Check("vectorized, expected rows among the first 20", "shop", share, "≥ 0.98", share >= 0.98)
    for destination in ("column", "table"):
        name = f"vectorized (destination {destination}), questions with the same first 20 as the rows as documents"
        yield Check(name, "shop", round(measured[destination], 4), "1", measured[destination] == 1)


def table_checks(folder: Path) -> Iterator[Check]:
    """Tables of PDFs."""
    found, there, several, milliseconds = tables.measure(folder)
    share = round(found / several, 4)
    yield Check(f"rows of {several} in PDFs that stand in a table", "tables", share, "(none)", None)
    # of others the PDF has marks elsewhere, or more of them, than the row that is asked for
    share = round(found / there, 4)
    yield Check(f"the same of the {there} whose cells the PDF has", "tables", share, "≥ 0.95", share >= 0.95)
    yield Check("PDFs with tables, ms a page", "tables", round(milliseconds, 2), "(none)", None)


def made_checks(name: str, found: made.Measured) -> Iterator[Check]:
    """What questions made of the documents say."""
    title = f"made questions, {found.answerable}: own segment among the first three"
    yield Check(title, name, round(found.own, 4), "(none)", None)
    if found.refused is not None and found.wrongly_refused is not None:
        title = f"made unanswerable questions, {found.unanswerable}: refused by the limit kept on their other half"
        yield Check(title, name, round(found.refused, 4), "(none)", None)
        yield Check("answerable ones refused by it", name, round(found.wrongly_refused, 4), "(none)", None)


@contextmanager
def recorded_model(
    connection: psycopg.Connection[Any], data: Path, store: str | None = None, written: made.Written | None = None
) -> Iterator[None]:
    """Meanwhile the database asks a model server that has the recorded completions too.

    ``store``: of Northwind, whose segments have recorded nodes. ``written``: recorded questions, in place of all these.
    """
    recorded = nodes.enrichments(connection, store, data) if store else None
    (former,) = connection.execute("SELECT value FROM ml_rag.setting WHERE name = 'model_server'").fetchone() or ("",)
    # where PostgreSQL's own user can enter
    with tempfile.TemporaryDirectory(prefix="ml_rag_eval_") as folder:
        Path(folder).chmod(0o711)
        path = Path(folder) / "recorded.sock"
        models = models_dir(load_catalogue())
        with (
            recorded_server(data, models, path, recorded)
            if written is None
            else served(made.writer(written), models, path)
        ) as server:
            connection.execute("SELECT ml_rag.configure('model_server', %s)", (f"unix:{server.socket}",))
            try:
                yield
            finally:
                connection.execute("SELECT ml_rag.configure('model_server', %s)", (former,))


def sets(data: Path, console: Console, wanted: Callable[[str], bool] = lambda _: True) -> list[Dataset]:
    """What can be read of the folder's folders, or the folder itself; says why the others cannot."""
    folders = [data] if any((data / name).exists() for name in ("questions.jsonl", "queries.jsonl")) else []
    found = []
    for folder in folders or sorted(
        path for path in data.iterdir() if path.is_dir() and path.name != "nlsql" and wanted(path.name)
    ):
        try:
            found.append(datasets.read(folder))
        except InvalidRequest as e:
            console.print(f"left out: {folder.name}: {(e.detail or '').partition(': ')[2]}", highlight=False)
    return found


def print_checks(found: Sequence[Check], console: Console) -> None:
    shown = Table(title="figures to reach", title_justify="left", box=None, pad_edge=False)
    for name in ("figure", "set", "value", "must reach", "reached"):
        shown.add_column(name, justify="right" if name == "value" else "left")
    for check in found:
        value = "none" if check.value is None else f"{check.value:.4g}"
        reached = "" if check.reached is None else "yes" if check.reached else "NO"
        shown.add_row(check.name, check.dataset, value, check.limit, reached)
    console.print(shown)


@click.command(help=__doc__)
@click.option("--dsn", envvar=["ML_RAG_BENCH_DSN", "ML_RAG_TEST_DSN"], required=True)
@click.option("--data", envvar="EVAL_DATA", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), default=HERE / "out" / "eval.json", show_default=True)
@click.option("--arms", default=",".join(ARMS), show_default=True)
@click.option("--only", metavar="SET,…", help="These sets; pair: two embeddings over squad2 and cmrc2018_trial.")
def main(dsn: str, data: Path, output: Path, arms: str, only: str | None) -> None:
    console = Console(width=200)
    if not data.is_dir():
        console.print(f"nothing to evaluate: no folder {data}; name one with EVAL_DATA=…", highlight=False)
        return

    def wanted(name: str) -> bool:
        return only is None or name in only.split(",")

    def has(name: str) -> bool:
        return wanted(name) and (data / name).is_dir()

    began = time.monotonic()
    own = own_database(dsn, DATABASE)
    results: dict[str, Any] = {}
    found: list[Check] = []
    with connect(own) as connection, Work(Console(stderr=True)) as work:
        # of a database of its own, where routines need no schema before them
        connection.execute("RESET search_path")
        for dataset in sets(data, console, wanted):
            # in northwind the prices stand in a picture
            ocr = shutil.which("tesseract") is not None and any(isinstance(d, Path) for d in dataset.documents.values())
            options = {"language": language(dataset), "ocr": ocr or None}
            evaluation = Evaluation(connection, dataset, "ml_rag_eval", options)
            result = measure(evaluation, arms.split(","), None, {"k": CUTOFFS}, work)
            console.print(table(result, CUTOFFS))
            for arm, run in result["arms"].items():
                if "missing" in run:
                    console.print(f"{ARMS[arm].title}: {run['missing']}", markup=False, highlight=False)
            console.print()
            found += checks(connection, evaluation, result)
            if dataset.name == "northwind" and (data / "recorded").is_dir():
                with recorded_model(connection, data):
                    found += question_checks(connection, evaluation, data, console, work)
                    pages = nodes.make_pages(connection, evaluation.store)
                with recorded_model(connection, data, pages):
                    found += merge_checks(connection, evaluation, pages, console, work)
                written = made.pages(nodes.enrichments(connection, pages, data))
                with recorded_model(connection, data, written=written):
                    found += made_checks(dataset.name, made.measure(connection, pages))
                answers, sentences = (round(x, 4) for x in grounding.kept(connection, dataset, evaluation.store))
                title = "answers of a large model without their unsupported sentences"
                found.append(Check(f"{title}: something is left", dataset.name, answers, "≥ 0.97", answers >= 0.97))
                found.append(Check(f"{title}: sentences that stay", dataset.name, sentences, "(none)", None))
            if dataset.name in ("northwind", "squad2"):
                found += sentence_checks(connection, evaluation, console, work)
                found += rerank_checks(connection, evaluation)
            if dataset.name == "squad2":
                found += node_checks(connection, evaluation)
            if dataset.name in ("squad2", "cmrc2018_trial"):
                found += extractive_checks(connection, evaluation, work)
            if dataset.name == "cmrc2018_trial" and extractive.is_here(connection, extractive.MULTILINGUAL):
                own_store = replace(dataset, name=f"{dataset.name} {extractive.MULTILINGUAL}")
                model = {"embed_model_id": extractive.MULTILINGUAL}
                evaluation = Evaluation(connection, own_store, "ml_rag_eval", {**options, **model})
                with work.task(f"{own_store.name}: documents") as task:
                    evaluation.load(task.tell)
                found += extractive_checks(connection, evaluation, work)
            if dataset.name == "squad2":
                found += abstain_checks(connection, evaluation)
                written = made.paragraphs(connection, evaluation.store, data)
                with recorded_model(connection, data, written=written):
                    measured = made.measure(connection, evaluation.store, made.UNANSWERABLE)
                    found += made_checks(dataset.name, measured)
            results[dataset.name] = {**result, "language": language(dataset)}
        pair = [data / name for name in ("squad2", "cmrc2018_trial")]
        if (
            wanted("pair")
            and all(folder.is_dir() for folder in pair)
            and extractive.is_here(connection, parts.MULTILINGUAL)
        ):
            found += embedding_checks(connection, [datasets.read(folder) for folder in pair], work)
        if has("nlsql"):
            more, results["nlsql"] = _questions_about_tables(connection, data / "nlsql")
            found += more
        if has("grounding"):
            found += grounding_checks(connection, data / "grounding", work)
        if has("tables"):
            found += table_checks(data / "tables")
        if has("shop"):
            found += rows_checks(connection, data)
        if has("shop") and (data / "recorded").is_dir():
            with recorded_model(connection, data):
                found += shop_checks(connection, data)
    print_checks(found, console)
    document = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine(),
        "sets": results,
        "checks": [asdict(check) for check in found],
    }
    write(output, document)
    console.print(f"written in {document['seconds']:.0f} s: {output}", highlight=False)
    missed = [check for check in found if check.reached is False]
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
