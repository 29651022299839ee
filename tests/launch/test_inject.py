"""``--inject``: refused unless it is allowed, checked before anything starts, and passed on."""

from __future__ import annotations

import pytest

from launch import store_role
from launch.cluster import plan
from launch.config import NodeOptions, StoreOptions, UpOptions
from launch.errors import ConfigError
from launch.main import main
from launch.parts import make_transfer, transfer_config
from launch.up import check

RULES = "read@tcp p=0.01 reset after=64KiB; seed=7"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_INJECT", "KVFERRY_ALLOW_INJECT", "KVFERRY_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_ALLOW_INJECT", "1")


@pytest.mark.parametrize("command", ["up", "store", "prefill", "decode"])
@pytest.mark.parametrize("permission", [None, "0", "yes"])
def test_faults_are_refused_unless_they_are_allowed(
    command: str,
    permission: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if permission is not None:
        monkeypatch.setenv("KVFERRY_ALLOW_INJECT", permission)
    model = [] if command == "store" else ["--model", "fake"]
    assert main([command, "--inject", "any drop", *model]) == 2
    line = capsys.readouterr().err
    assert line.startswith("kvferry: error: --inject any drop: ")
    assert "KVFERRY_ALLOW_INJECT=1" in line
    monkeypatch.setenv("KVFERRY_INJECT", "any reset")
    assert main([command, *model]) == 2
    assert "--inject any reset: " in capsys.readouterr().err


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("command", ["up", "store", "prefill", "decode"])
def test_a_bad_rule_is_one_line_with_the_rule_the_position_and_the_remedy(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if command == "store" else ["--model", "fake"]
    assert main([command, "--inject", "any drop; read p=2 reset", *model]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    for word in ("--inject", "rule 2", "'read p=2 reset'", "position 16", "write p=0.01"):
        assert word in lines[0]


@pytest.mark.usefixtures("allowed")
def test_rules_reach_the_engine_of_every_role_that_has_one() -> None:
    for options in (StoreOptions.of(inject=RULES), NodeOptions.of(inject=RULES)):
        assert make_transfer(options, None).config.inject == RULES
    assert make_transfer(StoreOptions.of(), None).config.inject == ""


@pytest.mark.usefixtures("allowed")
def test_up_says_loudly_that_faults_are_injected_and_passes_them_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = UpOptions.of(model="fake", inject=RULES, port=8000, join_port=8100)
    check(options)
    assert f"FAULTS ARE INJECTED into every transfer, as asked for: {RULES}" in (
        capsys.readouterr().err
    )
    for child in plan(options):
        passed_on = "--inject" in child.argv and RULES in child.argv
        assert passed_on is (child.name != "gateway"), child.name


@pytest.mark.net
@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("rule", "warned"), [("read@ucx drop", True), ("read@tcp drop", False)])
async def test_a_rule_about_a_transport_that_is_not_there_is_warned_of_at_the_start(
    rule: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_transfer(StoreOptions.of(inject=rule, transfer="tcp"), None)
    try:
        await engine.start()
    finally:
        await engine.close()
    found = [r.getMessage() for r in caplog.records if "NEVER APPLIES" in r.getMessage()]
    assert bool(found) is warned
    assert all(rule in line and "tcp" in line and "--transfer" in line for line in found)


def test_an_empty_variable_means_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[StoreOptions] = []
    monkeypatch.setattr(store_role, "run", given.append)
    for text in ("", "any drop"):
        monkeypatch.setenv("KVFERRY_INJECT", text)
        assert main(["store"]) == 0
    assert transfer_config(given[0], None).inject == ""
    assert given[1].inject == "any drop"


def test_without_permission_nothing_else_changes() -> None:
    assert transfer_config(UpOptions.of(), None).inject == ""
    with pytest.raises(ConfigError, match="KVFERRY_ALLOW_INJECT=1"):
        transfer_config(UpOptions.of(inject=RULES), None)
