"""The plan of ``up`` says what each process is told; sizes, cores and ports are read exactly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.page import PageSpec
from launch import process_env
from launch.cluster import Display, plan, python_path, with_ports
from launch.config import NodeOptions, UpOptions
from launch.errors import ConfigError
from launch.ports import check_free, free_port, listen_on
from launch.sizes import human_size, pages_in, parse_size, segment_size
from launch.up import usage
from transfer.identity import Role, new_identity
from transfer.registry_client import RegistryMembership
from transfer.zmq_network import ZmqNetwork

ROOT = Path(__file__).resolve().parents[2]


def arguments(argv: list[str]) -> dict[str, str]:
    at = argv.index("launch.main") + 2
    return dict(zip(argv[at::2], argv[at + 1 :: 2], strict=True))


def test_every_node_gets_its_name_its_gpu_and_the_join_address() -> None:
    options = UpOptions.of(
        model="fake", prefill=2, decode=3, store=1, port=8123, join_port=8999, gpus="0,1"
    )
    specs = {spec.name: spec for spec in plan(options)}
    nodes = ["prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3"]
    assert list(specs) == ["gateway", "store-1", *nodes]
    told = {name: arguments(list(spec.argv)) for name, spec in specs.items()}
    assert told["gateway"]["--port"] == "8123"
    assert all(
        told[name]["--join"] == "tcp://127.0.0.1:8999" for name in specs if name != "gateway"
    )
    assert [told[name]["--gpus"] for name in nodes] == ["0", "1", "0", "1", "0"]
    assert all(told[name]["--node-id"] == name for name in specs)
    assert specs["gateway"].stop_order < min(specs[name].stop_order for name in nodes)


def test_an_ipv6_host_is_joined_in_brackets() -> None:
    specs = plan(UpOptions.of(model="fake", host="::1", port=8123, join_port=8999))
    joins = [arguments(list(spec.argv)).get("--join") for spec in specs]
    assert joins == ["tcp://[::1]:8999"] * 4


def test_what_up_is_told_about_computing_reaches_the_nodes() -> None:
    options = UpOptions.of(
        model="fake", page_size=32, num_pages=77, threads=3, chunk_size=128, port=1, join_port=2
    )
    (spec,) = [spec for spec in plan(options) if spec.name == "decode-1"]
    told = arguments(list(spec.argv))
    node = NodeOptions.of(**{k[2:].replace("-", "_"): v for k, v in told.items()})
    assert (node.page_size, node.num_pages, node.threads, node.chunk_size) == (32, 77, 3, 128)


def test_what_up_is_told_about_stores_reaches_each_with_a_directory_of_its_own() -> None:
    quotas = (f"{'ab' * 32}=0.3", f"{'cd' * 32}=0.2")
    options = UpOptions.of(
        **{"model": "fake", "store": 2, "port": 1, "join_port": 2, "segment": "64MiB"},
        **{"ssd": "/mnt/a:b/:64MiB", "policy": "heat", "replicas": 2, "quota": quotas},
        high_watermark=0.8,
        low_watermark=0.7,
    )
    stores = [spec for spec in plan(options) if spec.name.startswith("store")]
    for number, spec in enumerate(stores, 1):
        argv = list(spec.argv)[list(spec.argv).index("store") + 1 :]
        pairs = list(zip(argv[::2], argv[1::2], strict=True))
        told = dict(pairs)
        assert told["--ssd"] == f"/mnt/a:b/store-{number}:64MiB"
        assert [value for name, value in pairs if name == "--quota"] == list(quotas)
        assert (told["--policy"], told["--replicas"]) == ("heat", "2")
        assert (told["--high-watermark"], told["--low-watermark"]) == ("0.8", "0.7")
    assert len(stores) == 2


def test_port_zero_takes_two_free_ports_and_a_named_port_moves_the_join_port() -> None:
    chosen = with_ports(UpOptions.of(port=0))
    assert chosen.join_port is not None
    assert chosen.port != chosen.join_port
    port = free_port("127.0.0.1")
    assert with_ports(UpOptions.of(port=port, join_port=0)).port == port


def test_nobody_is_told_to_start_the_gateway_that_up_starts_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seat = RegistryMembership(ZmqNetwork(), "tcp://h:8100", new_identity(Role.STORE, "store-1"))
    waits = f"store-1 waits for the registry at tcp://h:8100 (refused); {seat._remedy()}"
    assert "kvferry gateway --join-port 8100" in waits
    display = Display()
    display.show("store-1", waits)
    assert capsys.readouterr().err == "", "all start at once"
    display.registry_expected = True
    display.show("store-1", waits)
    display.show("store-1", "x; start it with: y")
    assert capsys.readouterr().err.splitlines() == [
        "[store-1] store-1 waits for the registry at tcp://h:8100 (refused)",
        "[store-1] x; start it with: y",
    ]


def test_children_find_the_same_packages_as_their_parent(tmp_path: Path) -> None:
    code = "import launch; print(launch.__file__)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | python_path(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert Path(result.stdout.strip()).parent == ROOT / "launch"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("512MiB", 1 << 29), ("2g", 2 << 30), ("1.5 GiB", 3 << 29), ("4096", 4096)],
)
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert parse_size(text, "--segment") == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1 GiB extra", "GiB", "1e9", "0.1"])
def test_what_is_no_size_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--segment"):
        parse_size(text, "--segment")


def test_pages_fill_the_memory_and_never_exceed_it() -> None:
    spec = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype="uint8")
    assert pages_in(10 * spec.page_nbytes + 1, spec, "--kv-memory") == 10
    with pytest.raises(ConfigError, match="--kv-memory"):
        pages_in(2 * spec.page_nbytes - 1, spec, "--kv-memory")
    assert human_size(3 << 20) == "3.0 MiB"


def test_cores_are_a_list_of_numbers_and_ranges() -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert process_env.parse_cores(str(usable[0])) == usable[:1]
    assert process_env.parse_cores(",".join(map(str, usable))) == usable
    if usable == list(range(len(usable))):
        assert process_env.parse_cores(f"0-{len(usable) - 1}") == usable


def test_the_environment_is_set_before_torch_reads_it() -> None:
    code = (
        "import os\n"
        "from launch import process_env\n"
        "core = min(os.sched_getaffinity(0))\n"
        "assert process_env.apply(cores=str(core), threads=None, gpus='3') == 1\n"
        "assert os.sched_getaffinity(0) == {core}\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == '3'\n"
        "import torch\n"
        "assert torch.get_num_threads() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_listening_socket_can_be_used_and_is_not_given_twice() -> None:
    with listen_on("127.0.0.1", 0, "--port") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: in use"):
            check_free("127.0.0.1", port, "--port")
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        check_free("192.0.2.1", 0, "--port")


def test_what_is_printed_names_the_real_model_and_ports_and_where_status_looks() -> None:
    text = usage("http://127.0.0.1:8123", "tcp://127.0.0.1:8999", "smollm2-135m")
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in text
    assert '"model": "smollm2-135m"' in text
    assert '"temperature": 0}' in text
    assert "  kvferry status --join tcp://127.0.0.1:8999\n" in text


def test_a_pool_too_small_is_told_as_the_user_wrote_it() -> None:
    spec = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32")
    with pytest.raises(
        ConfigError,
        match=r"--kv-memory 1KiB: a page has 8\.0 KiB \(8192 bytes\): give at least 16\.0 KiB",
    ):
        pages_in(1024, spec, "--kv-memory 1KiB")


def test_segments_of_all_stores_together_fit_in_the_machine() -> None:
    assert segment_size("1GiB") == 1 << 30
    with pytest.raises(ConfigError, match=r"times 99999 stores: more than the .* of memory"):
        segment_size("1GiB", num_stores=99999)
