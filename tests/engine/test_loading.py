"""Claims about loading: what does not fit is one clear error, what fits has a true fingerprint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.interface import resolve_attention
from engine.config import resolve_device, resolve_dtype
from engine.errors import ModelLoadError
from engine.loader import load_runner
from engine.model_config import parse_model_config
from engine.runner import ModelRunner
from tests.engine.checkpoints import make_model, save


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen2"), tmp_path_factory.mktemp("original"))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def load(directory: Path, **kwargs: Any) -> ModelRunner:
    return load_runner(directory, **{"device": "cpu", "dtype": "float32", "num_pages": 4, **kwargs})


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def test_shards_load_to_the_same_fingerprint(original: Path, tmp_path: Path) -> None:
    sharded = save(make_model("qwen2"), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert load(sharded).info.fingerprint == load(original).info.fingerprint


def test_fingerprint_changes_with_one_weight_and_with_rope(original: Path, copy: Path) -> None:
    base = load(original).info.fingerprint
    assert load(copy).info.fingerprint == base
    norm = load_file(copy / "model.safetensors")["model.norm.weight"]
    norm[3] += 1e-3
    edit_tensors(copy, **{"model.norm.weight": norm})
    assert load(copy).info.fingerprint != base
    edit_tensors(
        copy,
        **{"model.norm.weight": load_file(original / "model.safetensors")["model.norm.weight"]},
    )
    assert load(copy).info.fingerprint == base
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    edit_config(copy, rope_parameters=rope)
    assert load(copy).info.fingerprint != base


def test_progress_ends_at_the_total(original: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(original, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_info_states_the_facts(original: Path) -> None:
    info = load(original, page_size=8, name="tiny").info
    assert (info.name, info.vocab_size, info.max_model_len) == ("tiny", 160, 256)
    assert info.eos_token_ids == {2}
    assert (info.spec.num_layers, info.spec.num_kv_heads, info.spec.head_dim) == (3, 2, 16)
    assert (info.spec.page_size, info.spec.dtype) == (8, "float32")


def test_several_eos_ids_come_from_the_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(copy).info.eos_token_ids == {7, 9}


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelLoadError, match=r"layers.1.mlp.up_proj.weight.*missing.*model.safet"):
        load(copy)


def test_an_unexpected_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, **{"model.layers.9.adapter": torch.zeros(2)})
    with pytest.raises(ModelLoadError, match=r"layers.9.adapter.*model.safetensors.*unexpected"):
        load(copy)


def test_a_misshapen_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, **{"model.norm.weight": torch.zeros(65)})
    with pytest.raises(ModelLoadError, match=r"model.norm.weight.*\[65\], not \[64\]"):
        load(copy)


def test_a_quantised_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(ModelLoadError, match=r"model.norm.weight.*I8"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, -200])
def test_a_truncated_file_is_refused(copy: Path, keep: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(copy)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded = save(make_model("qwen2"), tmp_path / "sharded", max_shard_size="60KB")
    victim = max(sharded.glob("*.safetensors"))
    victim.unlink()
    with pytest.raises(ModelLoadError, match=victim.name):
        load(sharded)


def test_directories_without_a_model_are_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere.*does not exist.*model pull"):
        load(tmp_path / "nowhere")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*.safetensors.*convert"):
        load(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config.json.*does not exist"):
        load(copy)


BASE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"architectures": None}, "none is not supported"),
        ({"vocab_size": None}, "vocab_size missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"num_attention_heads": 0}, "num_attention_heads missing or not positive"),
        ({"num_key_value_heads": "2"}, "wrong kind"),
        ({"max_position_embeddings": None}, "wrong kind"),
        ({"rope_theta": "x"}, "wrong kind"),
    ],
)
def test_unsupported_features_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        parse_model_config({**BASE, **changes}, eos_token_id=2, source="config.json")
    assert "\n" not in str(caught.value)


def test_both_spellings_of_rope_are_equal() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
    first, second = (
        parse_model_config({**BASE, **x}, eos_token_id=[1, 2], source="x") for x in (old, new)
    )
    assert first == second
    assert (first.rope.theta, first.rope.factor) == (5e5, 4.0)


def test_devices_and_dtypes_are_judged() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == torch.float32
    with pytest.raises(ModelLoadError, match=r"float16.*cpu"):
        resolve_dtype("float16", cpu)
    with pytest.raises(ModelLoadError, match="'int4'"):
        resolve_dtype("int4", cpu)
    with pytest.raises(ModelLoadError, match="'tpu'"):
        resolve_device("tpu")
    with pytest.raises(ModelLoadError, match=r"flashinfer.*cuda"):
        resolve_attention("flashinfer", cpu)
    with pytest.raises(ModelLoadError, match="'triton'"):
        resolve_attention("triton", cpu)
    assert resolve_attention("auto", cpu) == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_names_the_remedy(original: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cuda.*--device cpu"):
        load(original, device="cuda")


def test_a_pool_that_cannot_be_is_refused(original: Path) -> None:
    with pytest.raises(ModelLoadError, match="num_pages=1"):
        load(original, num_pages=1)
    with pytest.raises(ModelLoadError, match="num_pages=1000000000000"):
        load(original, num_pages=10**12)
    with pytest.raises(ModelLoadError, match="page_size=0"):
        load(original, page_size=0)
