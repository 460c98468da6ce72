"""The house rules, as ordinary tests over the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "flowstone"

# Layer -> what it may import of ours. A layer is a module or a package of src/flowstone.
_BASE = {"config", "errors", "events", "pieces", "rules", "_version"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "config": {"errors"},  # what an option cannot be
    "errors": set(),
    "events": set(),
    "pieces": {"errors"},
    "rules": {"errors"},
    "calls": {"config", "errors", "rules"},
    "regions": {"calls", "errors", "pieces"},
    "progress": set(),
    "threads": {"errors"},
    "uninterrupted": set(),
    "turns": {"errors", "uninterrupted"},
    "telling": {"errors", "events"},
    "ending": {"errors", "progress"},
    "writer_lock": {"errors"},
    "format": {"config", "errors", "pieces", "_native"},
    "plan": {"config", "errors", "pieces", "rules", "format"},
    "store": {"config", "errors", "format", "_native"},
    "stage": {"config", "errors", "pieces", "format", "plan", "store", "state", "_native"},
    "state": {"config", "errors", "pieces", "format"},
    "commit": {"config", "errors", "pieces", "format", "store", "_native"},
    "ranks": {"config", "errors"},
    "reader": _BASE | {"calls", "regions", "format", "plan", "store", "stage", "commit", "state"},
    "saves": {"reader", "uninterrupted"},
    "in_flight": _BASE | {"format", "store", "commit", "saves"},
    "messages": _BASE | {"format", "plan", "store"},
    "rank_zero": _BASE | {"format", "plan", "store", "commit", "ranks", "messages"},
    "save_coordinator": _BASE | {"format", "plan", "store", "commit", "ranks", "rank_zero", "messages"},
    "changed": {"config", "errors"},
    "unplanned": _BASE | {"stage", "state", "saves", "changed"},
    "saving": _BASE | {"format", "plan", "store", "stage", "commit", "state", "saves", "messages", "save_coordinator"}
    | {"changed", "unplanned", "uninterrupted", "_native"},
    "handover": _BASE | {"store", "stage", "state", "in_flight", "saving", "turns"},
    "rank_group": _BASE | {"ranks", "save_coordinator", "turns"},
    "loading": _BASE | {"format", "plan", "store", "stage", "state", "reader", "rank_group", "progress"},
    "explaining": _BASE | {"calls", "format", "plan", "loading", "reader", "ranks"},
    "checkpointer": _BASE
    | {"format", "store", "stage", "commit", "state", "reader", "saves", "in_flight", "saving", "loading"}
    | {
        "handover", "save_coordinator", "rank_group", "threads", "turns", "calls", "ending", "telling", "unplanned",
        "writer_lock"
    }
    | {"uninterrupted", "_native"},
    "study": _BASE | {"format", "plan", "store", "stage", "commit", "reader", "_native"},
    "cli": _BASE | {"format", "reader", "progress", "demo", "cli_ls", "cli_output", "cli_bench", "cli_tune"},
    "cli_ls": {"calls", "errors", "format", "store", "commit", "cli_output"},
    "cli_bench": {"config", "progress", "study", "cli_output"},
    "cli_tune": {"config", "study", "cli_bench", "cli_output"},
    "cli_output": {"errors"},
    "demo": {"flowstone", "events"},
    "__init__": _BASE | {"reader", "checkpointer", "loading", "explaining", "saves", "state"},
    "__main__": {"cli"},
}
TORCH_ALLOWED = {"state", "stage", "ranks", "adapters", "demo"}
WITHOUT_TORCH = {"stage/arena.py", "stage/scatter.py", "stage/__init__.py"}  # read by verbs that need none
PURE_FORBIDDEN = {"os", "time", "socket", "threading", "pathlib", "random", "torch", "io", "shutil"}

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600


def _sources(base: Path = PACKAGE) -> list[Path]:
    return sorted(base.rglob("*.py"))


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path, *, lazy: bool = True) -> list[str]:
    """Modules that a file imports, dotted; without those under TYPE_CHECKING, and optionally only at top level."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    found = []
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_layers_import_only_what_the_table_allows(path: Path) -> None:
    layer = _layer(path)
    assert layer in MAY_IMPORT, f"{layer} is not in the table of layers"
    for module in _imports(path):
        head, _, rest = module.partition(".")
        if head != "flowstone":
            continue
        target = rest.partition(".")[0] or "flowstone"
        if not (PACKAGE / target).exists() and not list(PACKAGE.glob(f"{target}.*")):
            target = "flowstone"  # a name of the public face
        allowed = MAY_IMPORT[layer] | {layer}
        assert target in allowed, f"{path.name} imports {module}; {layer} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_where_it_is_needed(path: Path) -> None:
    uses_torch = any(module.partition(".")[0] == "torch" for module in _imports(path))
    name = str(path.relative_to(PACKAGE))
    if uses_torch:
        assert _layer(path) in TORCH_ALLOWED, f"{name} imports torch"
        assert name not in WITHOUT_TORCH, f"{name} imports torch"


def test_plan_is_pure() -> None:
    for path in _sources(PACKAGE / "plan"):
        heads = {module.partition(".")[0] for module in _imports(path)}
        assert not heads & PURE_FORBIDDEN, f"{path.name} imports {sorted(heads & PURE_FORBIDDEN)}"


def test_nobody_pickles() -> None:
    banned = re.compile(r"\b(pickle|marshal|shelve|dill|cloudpickle)\b|torch\.load\(|(?<!\w)eval\(|(?<!\w)exec\(")
    for path in _sources():
        if _layer(path) == "demo":
            continue  # it times torch.save against us
        code = re.sub(r'""".*?"""|#.*', "", path.read_text(), flags=re.DOTALL)
        assert not banned.search(code), f"{path.name} uses {banned.search(code)}"


def _functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in ast.walk(tree) if isinstance(n, kinds)]


@pytest.mark.parametrize("folder", ["src", "tests", "bench"])
def test_functions_and_files_stay_short(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        long = [f"{name} ({lines})" for name, lines in _functions(path) if lines > FUNCTION_LINES_MAX]
        assert not long, f"{path.relative_to(ROOT)}: over {FUNCTION_LINES_MAX} lines: {', '.join(long)}"
        lines = len(path.read_text().splitlines())
        assert lines <= FILE_LINES_MAX, f"{path.relative_to(ROOT)} has {lines} lines"


@pytest.mark.parametrize("path", sorted((ROOT / "native").rglob("*.[ch]*")), ids=lambda p: p.name)
def test_native_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX


def test_native_core_links_neither_torch_nor_cuda() -> None:
    for path in sorted((ROOT / "native").rglob("*.[ch]*")):
        text = path.read_text()
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|cuda)', text), f"{path.name} includes torch or CUDA"
        if not (path.name.startswith("bind") and path.suffix == ".cpp"):
            assert not re.search(r'#include\s*[<"](Python\.h|nanobind)', text), f"{path.name} includes Python"


def test_modules_have_docstrings_and_no_mutable_globals() -> None:
    for path in _sources():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path.relative_to(PACKAGE)} has no docstring"
        for node in tree.body:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign) else None
            names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
            empty = isinstance(value, ast.List | ast.Dict | ast.Set) and not ast.unparse(value).strip("[]{}")
            assert not empty, f"{path.relative_to(PACKAGE)}: {names} is mutable state of a module"


RETIRED = re.compile(
    r"\b(strands?|Scissors|poured|Dealt|index_of_team|[Ss]pine|unseal|astray|[Pp]ulses?|Hearing|Heard|"
    r"Together|team|Passing|Neighbours?|Landing|Landed|strewn|hurry|hurries|[Ll]eisures?|Means|[Ss]urvey|"
    r"[Ll]edger|Drawn|[Aa]natomy|keeper|Flight|withdraw|unsound|seams?|Troubles|[Ss]torm|redeal)\b"
)
"""Private pictures that have given way to the field's words, in code and in what is said about it."""


@pytest.mark.parametrize("folder", ["src/flowstone", "native", "docs"])
def test_retired_words_do_not_come_back(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".pyi", ".md", ".h", ".cpp") or path.name == "PERFORMANCE.md":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = RETIRED.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number} says {found}: a retired word"


def test_the_repository_speaks_of_the_project_only() -> None:
    banned = re.compile(r"/root/|/home/\w+|/work/|localhost:\d|pypi\.org|deb\.debian\.org", re.IGNORECASE)
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *_sources(), *ROOT.glob("bench/**/*.py")]
    for path in files:
        found = banned.search(path.read_text())
        assert not found, f"{path.relative_to(ROOT)} says {found}"
