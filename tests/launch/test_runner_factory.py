"""What this machine cannot compute is refused by the option that asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import ComputeOptions
from launch.errors import ConfigError
from launch.model_store import ResolvedModel
from launch.runner_factory import make_runner

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA works")


@no_cuda
@pytest.mark.parametrize(
    ("asked", "gpus", "blamed"),
    [
        ({"device": "cuda"}, None, "--device cuda: torch"),
        ({"attention": "flashinfer"}, None, "--attention flashinfer: needs --device cuda"),
        ({}, "0", "--gpus 0: torch"),
    ],
)
def test_without_cuda_the_option_that_needs_it_is_blamed(
    asked: dict[str, Any], gpus: str | None, blamed: str, tmp_path: Path
) -> None:
    model = ResolvedModel("m", tmp_path)
    with pytest.raises(ConfigError) as raised:
        make_runner(ComputeOptions.of(**asked), model, torch.get_num_threads(), gpus=gpus)
    assert str(raised.value).startswith(blamed)


@pytest.mark.parametrize("gpus", ["0,1", None])
def test_the_fake_model_needs_no_gpu_and_says_that_it_uses_none(
    gpus: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    options = ComputeOptions.of(model="fake")
    make_runner(options, ResolvedModel("fake", None), torch.get_num_threads(), gpus=gpus)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"--gpus {gpus}: the fake model computes on the CPU and uses no GPU"] * bool(
        gpus
    )
