"""The house rules, read off the source with `ast`: layers, import owners, cycles, function lengths.

Layers: imports go down only (docs/architecture.md). Owners: who alone may import a heavy or impure
module. Lengths: style rules for functions and files. Nothing here runs the code it reads.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headrace"

LAYERS: dict[str, int] = {
    "errors": 0,
    "types": 0,
    "config": 0,
    "observe": 0,
    "formats": 1,
    "text": 1,
    "backends": 2,
    "models": 3,
    "engine": 4,
    "service": 5,
    "llm": 5,
    "server": 6,
    "bench": 6,
    "cli": 7,
}

# Imports inside one layer that are part of the design: the base files may use each other, and the
# Python API wraps the service.
SAME_LAYER = {("types", "errors"), ("config", "errors"), ("observe", "types"), ("llm", "service")}

PURE = {f"engine/{name}.py" for name in ("pages", "prefix", "program", "scheduler")}

# Module -> path prefixes under src/headrace that may import it at run time. An empty list: nobody.
OWNERS: dict[str, tuple[str, ...]] = {
    "torch": (),
    "triton": (),
    "transformers": (),
    "ray": (),
    "gguf": (),
    "pickle": (),
    "headrace._native": ("backends/cpu.py",),
    "fastapi": ("server/",),
    "starlette": ("server/",),
    "uvicorn": ("server/",),
    "prometheus_client": ("server/",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "huggingface_hub": ("formats/download.py",),
    "jinja2": ("text/",),
    "tokenizers": ("text/",),
    "sentencepiece": ("text/",),
    "numpy": (
        "formats/",
        "backends/",
        "models/rope.py",
        "models/weights.py",
        "engine/runner.py",
        "engine/sampler.py",
        "bench/",
    ),
    "time": ("observe.py", "engine/loop.py", "text/metering.py", "formats/store.py", "bench/"),
    "asyncio": ("service.py", "llm.py", "server/"),
    "threading": (
        "service.py",
        "server/",
        "engine/loop.py",
        "text/sandbox.py",
        "text/huggingface.py",
        "bench/timing.py",
    ),
    "random": (),
    "secrets": ("service.py", "engine/loop.py", "server/app.py"),
    "logging": ("server/", "cli/"),
}

MAX_FUNCTION = 70
MEDIAN_FUNCTION = 8
P90_FUNCTION = 30
MAX_FILE = 600
MAX_PARAMETERS = 6


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(module, whether it is imported when the file is) of every run-time import."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in top
            # `from headrace import x` may name a module
            if node.module == "headrace":
                yield from ((f"headrace.{a.name}", id(node) in top) for a in node.names)


def room(module: str) -> str:
    """`headrace.engine.loop` lives in the room `engine`."""
    return module.split(".")[1]


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_go_down(path: Path) -> None:
    module = module_name(path)
    if module == "headrace":
        return  # the package's face: lazy names only, checked by the import-time test below
    own = room(module)
    for name, _ in imported(ast.parse(path.read_text())):
        if not name.startswith("headrace.") or name == "headrace._native":
            continue
        other = room(name)
        if other == "__version__" or own == other:
            continue
        allowed = LAYERS[other] < LAYERS[own] or (own, other) in SAME_LAYER
        assert allowed, f"{relative(path)} imports {name}: layer {LAYERS[other]} from {LAYERS[own]}"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_heavy_and_impure_modules_have_owners(path: Path) -> None:
    where = relative(path)
    for name, _ in imported(ast.parse(path.read_text())):
        for owned, owners in OWNERS.items():
            if name == owned or name.startswith(owned + "."):
                assert where.startswith(owners) if owners else False, f"{where} imports {name}"


@pytest.mark.parametrize("path", sorted(PURE))
def test_pure_files_import_only_plain_things(path: str) -> None:
    allowed = ("__future__", "collections", "dataclasses", "typing", "enum", "heapq", "itertools")
    for name, _ in imported(ast.parse((SOURCE / path).read_text())):
        is_pure_peer = name in {f"headrace.engine.{Path(p).stem}" for p in PURE}
        is_base = name in ("headrace.types", "headrace.errors")
        assert name.split(".")[0] in allowed or is_pure_peer or is_base, f"{path} imports {name}"


def test_only_config_reads_the_environment() -> None:
    for path in sources():
        text = path.read_text()
        if relative(path) != "config.py":
            assert "os.environ" not in text, relative(path)
            assert "getenv" not in text, relative(path)


def test_modules_have_no_import_cycle() -> None:
    modules = {module_name(path): path for path in sources()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name for name, at_top in imported(ast.parse(path.read_text())) if at_top}
        graph[module] = {name for name in names if name in modules and name != module}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


# ---- sizes


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield relative(path), node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_functions_are_short() -> None:
    lengths = sorted(length(node) for _, node in functions())
    too_long = [f"{where}:{n.name}" for where, n in functions() if length(n) > MAX_FUNCTION]
    assert not too_long
    assert statistics.median(lengths) <= MEDIAN_FUNCTION
    assert lengths[int(0.9 * len(lengths))] <= P90_FUNCTION


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Typer commands and keyword-only faces list their options as parameters by design."""
    return bool(node.decorator_list) or not node.args.args[MAX_PARAMETERS + 1 :]


def test_functions_take_few_positional_parameters() -> None:
    wide = [f"{where}:{node.name}" for where, node in functions() if not is_command(node)]
    assert not wide


def test_files_are_short_and_introduce_themselves() -> None:
    for path in sources():
        text = path.read_text()
        assert text.count("\n") <= MAX_FILE, relative(path)
        assert ast.get_docstring(ast.parse(text)), f"{relative(path)} has no docstring"


# ---- what starting costs


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_import_headrace_is_light() -> None:
    heavy = {"numpy", "fastapi", "typer", "rich", "tokenizers", "jinja2", "torch", "transformers"}
    assert not modules_after("import headrace") & heavy


def test_run_path_has_no_server_and_no_torch() -> None:
    heavy = {"fastapi", "uvicorn", "torch", "transformers", "ray", "prometheus_client"}
    statement = "import headrace; headrace.LLM; import headrace.cli.run, headrace.engine.lifecycle"
    assert not modules_after(statement) & heavy
