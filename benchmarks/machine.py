"""What a measurement must name: machine, date, versions. And the text that prompts are cut from."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


def describe() -> str:
    """Return one line about this machine and the libraries that matter."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    cores = len(psutil.Process().cpu_affinity())
    memory = psutil.virtual_memory().total / 2**30
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        f"{day}, {model}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}"
    )


def text_tokens(model_dir: Path, count: int) -> list[int]:
    """Return ``count`` tokens of real text (this project's licence), repeated when needed."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokens: list[int] = tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8")).ids
    return (tokens * (count // len(tokens) + 1))[:count]
