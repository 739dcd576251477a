"""server/recommend.py and ml-rag models recommend: what fits a machine and its languages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ml_rag.cli import main
from ml_rag.server import recommend as module
from ml_rag.server.catalogue import ModelEntry, load_catalogue
from ml_rag.server.recommend import Machine, recommend, speaks


def entry(name: str, megabytes: int | None, **keys: object) -> ModelEntry:
    table = {"id": name, "task": "generate", "engine": "sentence-transformers", "languages": "many"}
    if keys.get("engine", "") != "sentence-transformers":
        table = {**table, "engine": "llama-cpp", "files": {"f": "unpinned"}}
    return ModelEntry.model_validate({**table, "megabytes": megabytes, **keys})


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Machine(30_000, 2), "at 1200"),
        (Machine(30_000, 1), "at 600"),
        (Machine(3600, 8), "at 1200"),
        (Machine(3599, 8), "at 600"),
        (Machine(1799, 8), None),
        (Machine(30_000, 2, gpu=8000), "at 5600"),
        (Machine(30_000, 2, gpu=7999), "at 1200"),
    ],
)
def test_the_largest_that_fits_is_taken(machine: Machine, expected: str | None) -> None:
    entries = [entry(f"at {size}".replace(" ", "-"), size) for size in (600, 1200, 5600)] + [entry("unknown", None)]
    found = [one.id.replace("-", " ") for one in recommend(entries, machine, ["en"])]
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"license": "CC-BY-NC-4.0"}, ["small"]),
        ({"thinks": True}, ["small"]),
        ({"license": "CC-BY-4.0"}, ["large"]),
        ({}, ["large"]),
    ],
)
def test_what_needs_care_is_not_recommended(keys: dict[str, object], expected: list[str]) -> None:
    entries = [entry("small", 600), entry("large", 1200, **keys)]
    assert [one.id for one in recommend(entries, Machine(30_000, 2), ["en"])] == expected


def test_a_gpu_counts_for_llama_cpp_only() -> None:
    torch = entry("torch", 1000, task="embed", engine="sentence-transformers")
    assert recommend([torch], Machine(30_000, 2, gpu=80_000), []) == []
    assert recommend([entry("gguf", 1000, task="embed")], Machine(30_000, 2, gpu=80_000), []) != []


@pytest.mark.parametrize(
    ("spoken", "languages", "expected"),
    [
        ("en", ["en", "en-GB", "EN"], True),
        ("en", ["en", "de"], False),
        ("many", ["de", "zh-TW"], True),
        (None, ["de"], False),
    ],
)
def test_english_models_are_for_english(spoken: str | None, languages: list[str], expected: bool) -> None:
    assert speaks(entry("m", 1, languages=spoken), languages) is expected


def test_on_a_small_machine_models_without_a_hub_are_enough_to_search() -> None:
    def ids(language: str) -> list[str]:
        return [one.id for one in recommend(load_catalogue(), Machine(20_000, 2), [language])]

    assert ids("en") == ["all_minilm_l6_v2", "ms-marco-minilm-l6-v2", "qwen2.5-1.5b-instruct"]
    assert ids("de") == ["multilingual-e5-small-q4", "qwen2.5-1.5b-instruct"]


def test_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: Machine(20_000, 2))
    run = CliRunner().invoke(main, ["models", "--models-dir", str(tmp_path), "recommend", "--language", "zh"])
    assert run.exit_code == 0
    assert "For 20000 MB of memory, 2 cores, no GPU:" in run.output
    assert "ml-rag models pull multilingual-e5-small-q4" in run.output
    assert "SELECT ml_rag.configure('embed_model_id', 'multilingual-e5-small-q4');" in run.output
    found = CliRunner().invoke(main, ["models", "--models-dir", str(tmp_path), "recommend", "--json"])
    assert json.loads(found.output)["machine"] == {"memory": 20_000, "cores": 2, "gpu": 0}


def test_the_command_says_why_it_names_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: Machine(20_000, 2))
    config = tmp_path / "ml_rag.toml"

    def told(reranker: str) -> list[str]:
        config.write_text(
            f'[models.mine]\ntask="rerank"\nengine="sentence-transformers"\n{reranker}\n'
            '[models.other]\ntask="rerank"\nengine="sentence-transformers"\nlanguages="en"\nmegabytes=1\n'
        )
        run = CliRunner().invoke(main, ["models", "recommend", "--config", str(config)])
        assert run.exit_code == 0, run.output
        return [line.split(maxsplit=1)[1] for line in run.output.splitlines() if line.startswith("  rerank")]

    (line,) = told('languages="many"\nmegabytes=121')
    assert line == (
        'none fits: the smallest for these languages, mine, has 121 MB, and 120 MB fit; model "hybrid" needs no files'
    )
    (line,) = told('languages="many"\nmegabytes=120')
    assert line.startswith("mine (120 MB;")


def test_a_task_without_a_model_for_the_languages_says_so() -> None:
    english = entry("english", 1, task="rerank", languages="en")
    assert module.why_none([english], Machine(20_000, 2), ["de"], "rerank") == (
        "none of the catalogue is for these languages"
    )


@pytest.mark.parametrize(("code", "status"), [("klingon", 2), ("", 2), ("d", 2), ("de", 0), ("pt-BR", 0), ("*", 0)])
def test_a_language_is_given_by_its_code(tmp_path: Path, code: str, status: int) -> None:
    run = CliRunner().invoke(main, ["models", "--models-dir", str(tmp_path), "recommend", "--language", code])
    assert run.exit_code == status
    assert ("is not a code of ISO 639, such as de or pt-BR" in " ".join(run.output.split())) == (status == 2)


def test_every_model_with_files_says_what_it_takes_and_what_it_is_good_for(tmp_path) -> None:
    run = CliRunner().invoke(main, ["models", "--models-dir", str(tmp_path), "list", "--json"])
    models = json.loads(run.output)
    assert len(models) > 45
    for model in models:
        if model["id"] == "extractive":  # the only one without files
            continue
        assert model["megabytes"] > 0, model
        assert model["languages"] in ("en", "many"), model
        assert model["description"], model
        assert model["license"], model
        assert model["task"] == "generate" or model["max_tokens"] >= 256, model
        assert model["task"] != "embed" or model["dimensions"] >= 384, model
    assert [model["id"] for model in models if not model["commercial_use"]] == ["jina-embeddings-v5-text-small"]
    cut = {model["id"]: model["min_dimensions"] for model in models if model["min_dimensions"]}
    assert cut["nomic-embed-text-v1.5"] == 64
    assert "all_minilm_l6_v2" not in cut


def test_the_list_says_what_is_to_be_known_before_a_model_is_taken(tmp_path) -> None:
    config = tmp_path / "ml_rag.toml"
    config.write_text(
        '[models.mine]\ntask="embed"\nengine="fake"\ndescription="good"\nlicense="cc-by-nc-4.0"\ndimensions=16\n'
        'min_dimensions=4\n[models.other]\ntask="generate"\nengine="fake"\ndescription="deep"\nthinks=true'
    )
    run = CliRunner().invoke(
        main, ["models", "list", "--config", str(config)], env={"ML_RAG_FAKE_MODELS": "1", "COLUMNS": "120"}
    )
    assert run.exit_code == 0
    lines = " ".join(run.output.replace("│", " ").split())
    assert "mine embed 4-16 yes good; not for commercial use (cc-by-nc-4.0)" in lines
    assert "deep; thinks before it answers, so give it" in lines
