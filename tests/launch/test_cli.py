"""Bad input of every kind ends in one line that names the value and the remedy, and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from launch import model_store
from launch.config import (
    DEFAULT_JOIN,
    ETCD_FORM,
    GatewayOptions,
    NodeOptions,
    Options,
    StoreOptions,
    UpOptions,
    option_of,
)
from launch.doctor.options import UNUSED, DoctorOptions
from launch.errors import ConfigError
from launch.main import main
from launch.option_words import taken_by
from launch.runtime import config_errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    for name in ("KVFERRY_JOIN", "KVFERRY_SECRET", "KVFERRY_INJECT", "KVFERRY_ALLOW_INJECT"):
        monkeypatch.delenv(name, raising=False)


BAD = [
    (["up", "--model", "no-such-model"], ["no-such-model", "smollm2-135m"]),
    (["up", "--model", "./no/such/dir"], ["./no/such/dir", "does not exist"]),
    (["up", "--port", "70000"], ["--port 70000", "65535"]),
    (["up", "--port", "65500", "--model", "fake"], ["--port 65500", "--join-port"]),
    (["up", "--port", "http"], ["--port", "http"]),
    (["up", "--transfer", "carrier-pigeon"], ["--transfer carrier-pigeon: give one of auto, "]),
    (["up", "--decode", "0"], ["--decode 0", "a whole number from 1 to 64"]),
    (["up", "--store", "65"], ["--store 65", "0 to 64", "mooncake://MASTER:PORT"]),
    (["up", "--store", "-1"], ["--store -1", "0 to 64", "mooncake://MASTER:PORT"]),
    (["up", "--store", "many"], ["--store many", "0 to 64", "mooncake://MASTER:PORT"]),
    (
        ["up", "--store", "redis://h:1", "--model", "fake"],
        ["--store redis://h:1", "write mooncake://MASTER:PORT"],
    ),
    (
        ["decode", "--store", "mooncake://h:1?replicas=99", "--model", "fake"],
        ["--store mooncake://h:1?replicas=99", "replicas 99: give at most 8"],
    ),
    (
        ["up", "--host", "0.0.0.0", "--model", "fake", "--secret-file", "SECRET"],
        ["--host 0.0.0.0", "--advertise-host"],
    ),
    (["up", "--segment", "much", "--model", "fake"], ["--segment much", "GiB"]),
    (["up", "--kv-memory", "0", "--model", "fake"], ["--kv-memory 0", "GiB"]),
    (["up", "--no-such-option"], ["--no-such-option", "--help"]),
    (["prefil"], ["prefil", "did you mean prefill?", "--help"]),
    (["scale"], ["no such command: scale: there are up, gateway, store, ", "--help"]),
    (["cache", "cler"], ["did you mean clear?", "kvferry cache --help"]),
    (["gateway", "--model", "smollm2-135m"], ["smollm2-135m", "kvferry model pull smollm2-135m"]),
    (["gateway", "--host", "0.0.0.0", "--model", "fake"], ["--host 0.0.0.0", "--secret-file"]),
    (["store", "--join", "nowhere"], ["--join nowhere", "tcp://HOST:PORT"]),
    (["store", "--join", "tcp://127.0.0.1:0"], ["--join tcp://127.0.0.1:0", "tcp://HOST:PORT"]),
    (["store", "--join", "etcd://h:2379"], ["--join etcd://h:2379", "etcd://HOST:2379/NAME"]),
    (["gateway", "--join", "etcd://h:0/x", "--model", "fake"], ["--join etcd://h:0/x", "no host"]),
    (["store", "--segment", "-1GiB"], ["--segment -1GiB", "512MiB"]),
    (["store", "--secret-file", "/no/such/file"], ["--secret-file /no/such/file", "No such file"]),
    (["up", "--secret-file", "/no", "--model", "smollm2-135m"], ["--secret-file /no", "holds"]),
    (["status", "--secret-file", "/no"], ["--secret-file /no", "holds"]),
    (["up", "--host", "0.0.0.0", "--model", "fake"], ["--host 0.0.0.0", "--secret-file"]),
    (["store", "--segment", "900TiB"], ["--segment 900TiB", "GiB of memory", "give less"]),
    (["store", "--segment", "1KiB"], ["--segment 1KiB", "at least 1MiB"]),
    (["up", "--segment", "900TiB", "--model", "fake"], ["--segment 900TiB", "give less"]),
    (["store", "--policy", "magic"], ["--policy magic: give one of lru, lfu, slru"]),
    (["store", "--replicas", "0"], ["--replicas 0: give a whole number from 1 to 8"]),
    (["store", "--replicas", "9"], ["--replicas 9", "8"]),
    (["up", "--replicas", "2", "--model", "fake"], ["--replicas 2", "--store 2"]),
    (["store", "--high-watermark", "1.5"], ["--high-watermark 1.5", "1"]),
    (["store", "--high-watermark", "nan"], ["--high-watermark nan", "1"]),
    (["store", "--high-watermark", "0.5"], ["--low-watermark 0.9", "--high-watermark 0.5"]),
    (["store", "--quota", "0.3"], ["--quota 0.3", "NAMESPACE=FRACTION", "kvferry namespace"]),
    (["store", "--quota", "ab=0.3"], ["--quota ab=0.3", "64 hex digits"]),
    (["store", "--quota", f"{'a' * 64}=30"], ["=30:", "0..1"]),
    (["store", "--quota", f"{'a' * 64}=nan"], ["=nan:", "0..1"]),
    (["store", *["--quota", f"{'a' * 64}=0.2"] * 2], ["has one already"]),
    (
        ["up", "--model", "fake", "--quota", f"{'a' * 64}=.7", "--quota", f"{'b' * 64}=.7"],
        ["all quotas together are 1.4", "at most 1"],
    ),
    (["store", "--ssd", "/mnt/nvme"], ["--ssd /mnt/nvme", "PATH:SIZE"]),
    (["store", "--ssd", ":1GiB"], ["--ssd :1GiB", "PATH:SIZE"]),
    (["store", "--ssd", "/tmp/x:lots"], ["--ssd /tmp/x:lots", "'lots' is no size", "512GiB"]),
    (["store", "--ssd", "/tmp/x:1KiB"], ["--ssd /tmp/x:1KiB: an SSD tier", "1.0 MiB", "larger"]),
    (["store", "--ssd", "/tmp/x:9000PiB"], ["--ssd /tmp/x:9000PiB", "smaller"]),
    (["store", "--ssd", "/:1GiB"], ["--ssd /:1GiB", "directory of its own"]),
    (["up", "--model", "fake", "--ssd", "/no/such/x:1GiB"], ["/no/such does not exist", "make it"]),
    (["cache", "clear"], ["--namespace", "--salt", "--all"]),
    (["cache", "clear", "--all", "--salt", "x"], ["--salt and --all", "leave all but one out"]),
    (["cache", "clear", "--namespace", "zz"], ["--namespace zz", "`kvferry namespace`"]),
    (["cache", "clear", "--namespace", ""], ["--namespace", "`kvferry namespace`"]),
    (["cache", "clear", "--all", "--timeout", "0"], ["--timeout 0", "above 0"]),
    (["status", "--timeout", "-1"], ["--timeout -1", "above 0"]),
    (["status", "--timeout", "nan"], ["--timeout nan", "above 0"]),
    (["namespace", "--timeout", "-1"], ["--timeout -1", "above 0"]),
    (["store", "--node-id", "bad id/../x"], ["--node-id bad id/../x", "digits, dots"]),
    (["store", "--node-id", ""], ["--node-id", "digits, dots"]),
    (["namespace", "--join", "here"], ["--join here", "tcp://"]),
    (["store", "--transfer", "loopback"], ["--transfer loopback", "kvferry up"]),
    (["prefill", "--transfer", "loopback"], ["--transfer loopback", "shm or tcp"]),
    (["decode", "--transfer", "loopback", "--count", "2"], ["--transfer loopback", "kvferry up"]),
    (["prefill", "--page-size", "0"], ["--page-size 0", "1"]),
    (["prefill", "--page-size", "4096"], ["--page-size 4096", "1024"]),
    (["prefill", "--num-pages", "1"], ["--num-pages 1", "2"]),
    (["prefill", "--cores", "0-x", "--model", "fake"], ["--cores 0-x", "0-3"]),
    (["prefill", "--cores", "9999", "--model", "fake"], ["--cores 9999", "core 9999"]),
    (["decode", "--device", "abacus"], ["--device abacus", "cpu"]),
    (["decode", "--gpus", "0,,1", "--count", "2", "--model", "fake"], ["--gpus 0,,1", "0,1"]),
    (["status", "--join", "here"], ["--join here", "tcp://"]),
    (["model", "path", "gpt-5"], ["gpt-5", "smollm2-135m"]),
    (["model", "pull", "gpt-5"], ["gpt-5", "smollm2-135m"]),
    (["model", "path", "smollm2-135m"], ["smollm2-135m", "model pull"]),
    (["model", "convert", "none.gguf", "out"], ["none.gguf", "no such file"]),
    (["model", "convert", ".", "out"], [".: is a directory", ".gguf"]),
    (["model", "path"], ["name", "--help"]),
]


@pytest.mark.parametrize(("argv", "words"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_one_line_with_the_value_and_the_remedy(
    argv: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("a secret that is long enough")
    assert main([str(tmp_path / "secret") if part == "SECRET" else part for part in argv]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("kvferry: error: ")
    for word in words:
        assert word in lines[0]
    assert captured.out == ""


MODELS: dict[str, type[Options]] = {
    "up": UpOptions,
    "gateway": GatewayOptions,
    "store": StoreOptions,
    "prefill": NodeOptions,
    "doctor": DoctorOptions,
}
CHECKED = [
    (command, option_of(name), taken_by(field))
    for command, model in MODELS.items()
    for name, field in model.model_fields.items()
    if taken_by(field) not in ("text", "true or false")
    and not (command == "doctor" and name in UNUSED)
]


@pytest.mark.parametrize(("command", "option", "taken"), CHECKED)
def test_no_library_speaks_for_an_option_that_is_wrong(
    command: str, option: str, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, option, "größe"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    if (command, option) == ("up", "--store"):
        taken = "a number of processes from 0 to 64, or mooncake://MASTER:PORT"
    assert line == f"kvferry: error: {option} größe: give {taken}"


def test_bounds_and_choices_are_said_in_words() -> None:
    fields = UpOptions.model_fields
    assert taken_by(fields["replicas"]) == "a whole number from 1 to 8"
    assert taken_by(fields["num_pages"]) == "a whole number of at least 2"
    assert taken_by(fields["high_watermark"]) == "a number above 0 and at most 1"
    assert taken_by(fields["start_timeout"]) == "a number above 0"
    assert taken_by(fields["dtype"]) == "one of auto, float32, bfloat16, float16"
    assert taken_by(DoctorOptions.model_fields["batch"]) == "a whole number"


class Inner(BaseModel):
    """Settings of some package, as ``config_errors`` meets them."""

    count: int = Field(1, ge=1, lt=8)
    share: float = Field(0.5, gt=0, le=1)
    kind: Literal["a", "b"] = "a"
    text: str = ""


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"count": 0}, "count 0: give at least 1"),
        ({"count": 8}, "count 8: give less than 8"),
        ({"count": "x"}, "count x: give a whole number"),
        ({"count": 1.5}, "count 1.5: give a whole number"),
        ({"share": 0}, "share 0: give more than 0"),
        ({"share": 2}, "share 2: give at most 1"),
        ({"share": "x"}, "share x: give a number"),
        ({"kind": "c"}, "kind c: choose from 'a' or 'b'"),
    ],
)
def test_a_packages_own_settings_are_refused_in_the_same_words(
    told: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught, config_errors("--option value"):
        Inner.model_validate(told)
    assert str(caught.value) == f"--option value: {words}"


def test_a_directory_that_is_no_model_is_refused_by_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", "--model", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["gateway", "--model", str(tmp_path)]) == 2
    assert "safetensors" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "file"))
    assert main(["model", "pull", "smollm2-135m"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_version_and_model_list_print_results_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ("version", "--version"):
        assert main([asked]) == 0
        assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["model", "list"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m\tnot pulled\t")


@pytest.mark.parametrize("command", ["up", "gateway", "store", "prefill", "decode"])
def test_help_shows_the_defaults_of_the_code(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in (MODELS | {"decode": NodeOptions})[command].model_fields.items():
        if name.startswith("fake_"):
            continue
        assert f"--{name.replace('_', '-')}" in text
        if field.default not in (None, ()):
            assert f"default: {field.default}]" in text


@pytest.mark.parametrize("command", ["up", "gateway", "store", "prefill", "decode", "status"])
def test_help_names_the_variable_of_the_secret(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--secret-file" in text
    assert "KVFERRY_SECRET" in text


@pytest.mark.parametrize("command", ["status", "namespace", "cache clear"])
def test_help_of_what_asks_a_cluster_says_where_in_the_words_of_other_commands(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"or {ETCD_FORM}. [default: {DEFAULT_JOIN}] [env var: KVFERRY_JOIN]" in text
    assert "--timeout NUMBER" in text
    assert "--join TEXT" in text
    assert not re.search(r"<\w+>", text)


def test_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, launch.main; "
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy', 'zmq', 'gguf'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "module", ["launch.store_role", "launch.gateway_role", "launch.status", "launch.cache"]
)
def test_store_gateway_and_status_never_import_torch(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "heavy = {'torch', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_options_survive_the_way_through_a_command_line() -> None:
    options = NodeOptions.of(node_id="p", page_size=32, join="tcp://127.0.0.1:9", threads=3)
    argv = options.argv()
    values = dict(zip(argv[::2], argv[1::2], strict=True))
    again = NodeOptions.of(**{k[2:].replace("-", "_"): v for k, v in values.items()})
    assert again == options


def test_pull_resolves_a_directory_that_is_complete_without_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = model_store.path_of("smollm2-135m")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({}))
    assert main(["model", "pull", "smollm2-135m"]) == 0
    assert main(["model", "path", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(directory)] * 2
