"""The house rules as tests: layers, sizes, determinism, leftovers.

In the manner of TigerBeetle's tidy: what a reviewer would otherwise have to say again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

LINE_COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
TEST_FILE_LINES_MAX = 600  # a suite of claims about one thing reads better in one place

# Package -> what it may import from inside of the repository. Anything else is an error.
# engine.request and kvstore.events are torch-free wire vocabulary (docs/architecture.md).
LAYERS: dict[str, set[str]] = {
    "transfer": set(),
    "kvstore": {"transfer"},
    "engine": {"kvstore.page", "kvstore.keys"},
    "prefill_node": {"engine", "kvstore", "transfer"},
    "decode_node": {"engine", "kvstore", "transfer"},
    "gateway": {"kvstore.page", "kvstore.keys", "kvstore.events", "engine.request", "transfer"},
    "launch": {"gateway", "prefill_node", "decode_node", "engine", "kvstore", "transfer"},
}

# What the simulator runs: time is the loop's, randomness is injected. The bulk transports and
# ZeroMQ touch the real world and are not simulated.
SIMULATED = {"kvstore", "prefill_node", "decode_node", "gateway"}
_SIMULATED_TRANSFER = (
    "rpc",
    "rpc_client",
    "rpc_frames",
    "rpc_handlers",
    "rpc_server",
    "kept_seat",
    "lazy_timer",
    "registry",
    "registry_client",
    "registry_view",
)
SIMULATED_FILES = {f"transfer/{name}.py" for name in _SIMULATED_TRANSFER}
BANNED_IN_SIMULATION = {
    "time.time": "loop.time()",
    "time.monotonic": "loop.time()",
    "time.perf_counter": "loop.time()",
    "time.sleep": "loop timers",
    "uuid.uuid4": "an injected random.Random",
    "uuid4": "an injected random.Random",
    "hash": "kvstore.keys or zlib.crc32",
    "random.random": "an injected random.Random",
    "random.randint": "an injected random.Random",
    "random.choice": "an injected random.Random",
    "random.shuffle": "an injected random.Random",
    "threading.Thread": "loop.run_in_executor",
}
BANNED_ANYWHERE = {"eval": "a parser", "exec": "a function", "os.system": "subprocess"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
PRINTING = {"launch", "benchmarks"}
LEFTOVERS = re.compile(r"\b(FIXME|TODO|XXX|HACK)\b|\bbreakpoint\(|\bpdb\b")


class Module(NamedTuple):
    """One source file."""

    name: str
    package: str
    text: str
    tree: ast.Module

    @property
    def is_product(self) -> bool:
        return self.package in LAYERS

    @property
    def is_simulated(self) -> bool:
        return self.package in SIMULATED or self.name in SIMULATED_FILES


def read(path: Path) -> Module:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    return Module(name, name.split("/")[0], text, ast.parse(text))


MODULES = [
    read(path)
    for folder in (*LAYERS, "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

Rule = Callable[[Module], Iterator[str]]


def file_is_one_idea(module: Module) -> Iterator[str]:
    lines = module.text.splitlines()
    limit = TEST_FILE_LINES_MAX if module.package == "tests" else FILE_LINES_MAX
    if len(lines) > limit:
        yield f"{len(lines)} lines, limit {limit}"
    if lines and ast.get_docstring(module.tree) is None:
        yield "1: module has no docstring"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_COLUMNS_MAX and "https://" not in line:
            yield f"{number}: line exceeds {LINE_COLUMNS_MAX} columns"


def functions_are_short(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {length} lines, limit {FUNCTION_LINES_MAX}"


def layers_hold(module: Module) -> Iterator[str]:
    if not module.is_product:
        return
    for number, target in imports(module.tree):
        root = target.split(".")[0]
        if root not in LAYERS or root == module.package:
            continue
        allowed = LAYERS[module.package]
        if not any(target == name or target.startswith(f"{name}.") for name in allowed):
            yield f"{number}: {module.package} may not import {target}"


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import; ``from a import b`` counts as ``a.b`` for packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module in LAYERS:
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def torch_stays_in_engine(module: Module) -> Iterator[str]:
    if module.package not in {"transfer", "kvstore", "gateway"}:
        return
    for number, target in imports(module.tree):
        if target.split(".")[0] == "torch":
            yield f"{number}: {module.package} may not import torch"


def calls_are_deterministic(module: Module) -> Iterator[str]:
    banned = dict(BANNED_ANYWHERE)
    if module.is_simulated:
        banned |= BANNED_IN_SIMULATION
    if module.is_product and module.package not in PRINTING:
        banned["print"] = "logging"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in banned:
                yield f"{node.lineno}: {name} is banned here, use {banned[name]}"


def nothing_is_pickled(module: Module) -> Iterator[str]:
    for number, target in imports(module.tree):
        if target.split(".")[0] in BANNED_MODULES:
            yield f"{number}: {target} is banned: no pickles"


def no_leftovers(module: Module) -> Iterator[str]:
    if module.name == "tests/test_house_rules.py":
        return
    for number, line in enumerate(module.text.splitlines(), 1):
        if match := LEFTOVERS.search(line):
            yield f"{number}: leftover {match[0]}"


RULES: list[Rule] = [
    file_is_one_idea,
    functions_are_short,
    layers_hold,
    torch_stays_in_engine,
    calls_are_deterministic,
    nothing_is_pickled,
    no_leftovers,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_house_rule(rule: Rule) -> None:
    broken = [f"{module.name}:{problem}" for module in MODULES for problem in rule(module)]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("package", "source", "rule"),
    [
        ("kvstore", '"""x"""\nimport engine.step\n', layers_hold),
        ("gateway", '"""x"""\nfrom engine import runner\n', layers_hold),
        ("gateway", '"""x"""\ndef f():\n    import torch\n', torch_stays_in_engine),
        ("decode_node", '"""x"""\nimport time\nt = time.time()\n', calls_are_deterministic),
        ("kvstore", '"""x"""\nh = hash("a")\n', calls_are_deterministic),
        ("engine", '"""x"""\nprint(1)\n', calls_are_deterministic),
        ("transfer", '"""x"""\nimport pickle\n', nothing_is_pickled),
        ("launch", "x = 1\n", file_is_one_idea),
        ("launch", '"""x"""\n' + "\n" * 500, file_is_one_idea),
        ("launch", '"""x"""\ndef f():\n' + "    x = 1\n" * 80, functions_are_short),
        ("launch", '"""x"""\n# FIX' + "ME later\n", no_leftovers),
    ],
)
def test_each_rule_catches_its_fault(package: str, source: str, rule: Rule) -> None:
    module = Module(f"{package}/example.py", package, source, ast.parse(source))
    assert list(rule(module))


def test_packages_are_listed_explicitly() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for name in LAYERS
        for path in (ROOT / name).rglob("__init__.py")
    }
    assert listed == present
