from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ml_rag.server.catalogue import CatalogueError, load_catalogue, models_dir

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ML_RAG_CONFIG", "ML_RAG_FAKE_MODELS", "ML_RAG_MODELS"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "admin.toml"
    path.write_text(text)
    return path


def test_built_in_models_have_the_official_pins(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, ""))
    minilm = catalogue.get("all_minilm_l6_v2")
    assert minilm is not None
    assert (minilm.dimensions, minilm.max_tokens, minilm.task) == (384, 256, "embed")
    assert minilm.files["model.safetensors"] == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert {"smollm2-135m-instruct", "ms-marco-minilm-l6-v2", "mistral-7b-instruct-v1"} <= set(catalogue.ids())


def test_fake_models_are_offered_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write(tmp_path, "")
    assert load_catalogue(plain).get("fake-embed") is None
    assert load_catalogue(plain, fake_models=True).get("fake-embed") is not None
    monkeypatch.setenv("ML_RAG_FAKE_MODELS", "1")
    assert load_catalogue(plain).get("fake-embed") is not None
    monkeypatch.setenv("ML_RAG_FAKE_MODELS", "0")
    assert load_catalogue(write(tmp_path, "[server]\nfake_models = true")).get("fake-embed") is None
    monkeypatch.delenv("ML_RAG_FAKE_MODELS")
    assert load_catalogue(write(tmp_path, "[server]\nfake_models = true")).get("fake-embed") is not None


def test_an_administrators_file_overrides_single_keys(tmp_path: Path) -> None:
    entry = load_catalogue(write(tmp_path, "[models.all_minilm_l6_v2]\nthreads = 3")).get("all_minilm_l6_v2")
    assert entry is not None
    assert (entry.threads, entry.dimensions) == (3, 384)


@pytest.mark.parametrize(
    ("table", "detail"),
    [
        ('[models.all_minilm_l6_v2]\ndevice = "gpu"', "device"),
        ('[models.smollm2-135m-instruct]\ndevice = "cuda"', "llama-cpp has gpu_layers"),
    ],
)
def test_a_device_that_no_engine_has(tmp_path: Path, table: str, detail: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(write(tmp_path, table))
    assert detail in f"{caught.value.message} {caught.value.detail}"


def test_an_administrators_file_adds_models(tmp_path: Path) -> None:
    text = '[models.mine]\ntask="generate"\nengine="openai"\nbase_url="http://localhost:1/v1"\napi_key_file="key"'
    entry = load_catalogue(write(tmp_path, text)).get("mine")
    assert entry is not None
    assert entry.api_key_file == str(tmp_path / "key")
    assert entry.missing(tmp_path) is not None
    (tmp_path / "key").write_text("k")
    assert entry.missing(tmp_path) is None


def test_a_path_source_is_used_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    text = '[models.mine]\ntask="generate"\nengine="llama-cpp"\nsources=[{path="x.gguf"}]'
    entry = load_catalogue(write(tmp_path, text)).get("mine")
    assert entry is not None
    assert entry.location(tmp_path / "models") == tmp_path / "x.gguf"
    assert entry.missing(tmp_path / "models") is None
    assert entry.pull_command is None


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[server]\nlissten = 'x'", "unknown key server.lissten in {}", "listen"),
        ("[sever]\n", "unknown key sever in {}", "server"),
        ("[models.all_minilm_l6_v2]\nthread = 1", "unknown key models.all_minilm_l6_v2.thread in {}", "threads"),
        (
            '[models.m]\ntask="embed"\nengine="fake"\nsources=[{pypi="a==1", membr="x"}]',
            "unknown key models.m.sources.0.membr in {}",
            "member",
        ),
        ("[models.all_minilm_l6_v2]\nthreads = 0", "bad value of models.all_minilm_l6_v2.threads in {}", None),
        ("[models.all_minilm_l6_v2]\ntask = 'embedd'", "bad value of models.all_minilm_l6_v2.task in {}", None),
        ("[server]\nmax_queue = 0", "bad value of server.max_queue in {}", None),
        ("[server]\nlisten = '8765'", "bad value of server.listen in {}", None),
        ('[models.m]\ntask="embed"\nengine="openai"', "bad value of models.m in {}", None),
        ('[models.m]\ntask="embed"\nengine="fake"\nfiles={"../x"="unpinned"}', "bad value of models.m in {}", None),
        ('[models.m]\ntask="embed"\nengine="fake"\nmin_dimensions=8', "bad value of models.m in {}", None),
        ('[models.m]\ntask="embed"\nengine="fake"\ninput=["text", "image"]', "bad value of models.m in {}", None),
        (
            '[models.m]\ntask="embed"\nengine="fake"\ndimensions=8\nmin_dimensions=8',
            "bad value of models.m in {}",
            None,
        ),
        ('[models.m]\ntask="embed"\nengine="fake"\nfiles={"x"="abc"}', "bad value of models.m.files.x in {}", None),
        ("[server", "{} is not valid TOML", None),
    ],
)
def test_a_mistake_is_named_with_file_and_key(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    path = write(tmp_path, text)
    with pytest.raises(CatalogueError, match=re.escape(message.format(path))) as caught:
        load_catalogue(path)
    if hint is not None:
        assert caught.value.hint is not None
        assert hint in caught.value.hint


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="cannot read"):
        load_catalogue(tmp_path / "none.toml")


def test_the_models_folder_is_chosen_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = load_catalogue(write(tmp_path, "[server]\nmodels_dir = '/from/file'"))
    assert models_dir(catalogue) == Path("/from/file")
    monkeypatch.setenv("ML_RAG_MODELS", "/from/env")
    assert models_dir(catalogue) == Path("/from/env")
    assert models_dir(catalogue, Path("/from/option")) == Path("/from/option")
    monkeypatch.delenv("ML_RAG_MODELS")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert models_dir(load_catalogue(write(tmp_path, ""))) == Path("/data/ml_rag/models")


def test_an_unknown_engine_gets_what_each_runs(tmp_path: Path) -> None:
    path = write(tmp_path, '[models.m]\ntask="generate"\nengine="ollama"')
    with pytest.raises(CatalogueError, match=r"bad value of models\.m\.engine") as caught:
        load_catalogue(path)
    assert "openai (models of an OpenAI-compatible endpoint)" in str(caught.value.detail)


def test_the_nearest_id(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, ""))
    # its beginning says more than letters that are alike: it was qwen3-1.7b
    assert catalogue.nearest("Qwen2.5-1.5b", "generate") == "qwen2.5-1.5b-instruct"
    assert (catalogue.nearest("hybird", "rerank"), catalogue.nearest("hybird")) == ("hybrid", None)
    assert catalogue.nearest("", "embed") is None


def test_a_text_of_many_megabytes_is_no_mistyped_id(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, ""))
    assert catalogue.nearest("all_minilm") == "all_minilm_l6_v2"
    began = time.process_time()
    assert catalogue.nearest("a" * 20_000_000) is None
    # it took 10 s, for which all requests waited
    assert time.process_time() - began < 1


def _entries_of_the_pages() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)]
    # one with tokens or stores is the gateway's, whose presets are called models, too
    ours = [block for block in blocks if "[tokens." not in block and "vector_store" not in block]
    return [block for block in ours if "[models." in block]


@pytest.mark.parametrize("block", _entries_of_the_pages())
def test_the_entries_that_the_pages_show_are_accepted(tmp_path: Path, block: str) -> None:
    catalogue = load_catalogue(write(tmp_path, block))
    for model_id in re.findall(r"^\[models\.(.+)\]", block, re.MULTILINE):
        assert catalogue.get(model_id.strip('"')) is not None
