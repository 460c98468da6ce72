"""The house rules, as ordinary tests over the source."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PACKAGE = SRC / "flowstone"

# Layer -> what it may import of ours. A layer is a module or a package of src/flowstone.
_BASE = {
    "config", "errors", "events", "save_events", "journal_events", "tier_events", "table", "trace", "quantize",
    "rules", "layout_rules", "log", "_version", "state_replica",
}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "config": {"errors"},  # what an option cannot be
    "errors": set(),
    "log": set(),  # lines of the log, from any thread
    "events": set(),
    "journal_events": set(),
    "save_events": set(),
    "tier_events": set(),
    "trace": {"errors", "_native"},  # the types of what the engine hands over
    "table": {"config", "errors"},  # the length of a chunk
    "name_patterns": set(),
    "rules": {"errors", "name_patterns"},
    "quantize": {"errors", "rules"},
    "layout_rules": {"errors", "name_patterns", "rules"},
    "arguments": {  # what an object lacks of a store
        "config", "errors", "quantize", "rules", "layout_rules", "state_replica", "store",
    },
    "striped": {"arguments", "config", "errors", "store"},
    "file_systems": {"arguments", "config", "errors", "store"},
    "regions": {"arguments", "errors", "table"},
    "runtime": {"errors", "events", "log"},
    "format": {"config", "errors", "table", "_native"},
    "plan": {"config", "errors", "table", "rules", "layout_rules", "name_patterns", "format"},
    "store": {"config", "errors", "log", "format", "_version", "_native"},
    "stage": {"config", "errors", "log", "table", "format", "plan", "store", "state", "_native"},
    "state": {"config", "errors", "log", "table", "format", "_native"},
    "commit": {"config", "errors", "log", "table", "format", "store", "_native"},
    "ranks": {"config", "errors", "log"},
    "agent": {  # memory that outlives a job
        "config", "errors", "format", "store", "commit", "tiers", "runtime", "_version",
    },
    "state_replica": {"errors"},
    "replica": _BASE | {"checkpointer", "pipeline", "ranks", "runtime", "store"},  # the process that has a state, too
    "tiers": _BASE | {"arguments", "format", "store", "commit", "_native"},
    "cluster": {"errors", "_version"},
    "notebook": set(),
    "verification": {"cluster", "config", "errors", "format", "store", "stage", "commit"},
    "checkpoint": _BASE
    | {"arguments", "regions", "streaming", "format", "plan", "store", "stage", "commit", "state", "verification",
       "notebook", "tiers"},
    "streaming": {"errors", "table", "format", "plan", "store", "stage", "state", "_native"},
    "pipeline": _BASE
    | {"arguments", "runtime", "format", "plan", "store", "stage", "commit", "state", "ranks", "checkpoint", "tiers",
       "_native"},
    "state_dict_verbs": _BASE
    | {"arguments", "runtime", "store", "commit", "state", "ranks", "checkpoint", "pipeline"},
    "adapters": _BASE
    | {"arguments", "checkpointer", "cluster", "format", "plan", "store", "stage", "commit", "state", "checkpoint",
       "pipeline", "_native",  # the public verbs too, for frameworks that save where a training loop would
       "runtime"},  # the end of a process that has not closed an adapter
    "checkpointer": _BASE
    | {"state_dict_verbs", "arguments", "runtime", "store", "commit", "state", "ranks", "checkpoint", "pipeline",
       "tiers"},
    "convert": _BASE
    | {"arguments", "cluster", "name_patterns", "format", "plan", "store", "commit", "checkpoint", "_native"},
    "cli": _BASE
    | {"arguments", "cluster", "runtime", "format", "store", "commit", "checkpoint", "convert", "tiers",
       "flowstone_demo", "flowstone_study"},
    "__init__": _BASE | {"checkpoint", "checkpointer", "convert", "pipeline", "state", "tiers"},
    "__main__": {"cli"},
    "flowstone_study": _BASE | {"runtime", "format", "plan", "store", "stage", "commit", "checkpoint", "_native"},
    "flowstone_demo": {"flowstone", "events", "journal_events", "commit"},  # the names of what a killed save leaves
}
TORCH_ALLOWED = {"state", "stage", "ranks", "adapters", "flowstone_demo"}
WITHOUT_TORCH = {"stage/arena.py", "stage/scatter.py", "stage/__init__.py"}  # read by verbs that need none
PURE_FORBIDDEN = {"os", "time", "socket", "threading", "pathlib", "random", "torch", "io", "shutil"}

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = {"src": 500, "bench": 500, "native": 500, "tests": 600}


def _sources(base: Path = SRC) -> list[Path]:
    return sorted(base.rglob("*.py"))


def _layer(path: Path) -> str:
    """A module or folder of the package; or a package beside it, which users of the library never import."""
    package, *rest = path.relative_to(SRC).parts
    return rest[0].removesuffix(".py") if package == PACKAGE.name else package


@functools.cache  # several tests ask for each file
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imports(path: Path) -> list[str]:
    """Modules that a file imports, dotted; without those under TYPE_CHECKING."""
    tree = _tree(path)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _layer_of(module: str) -> str | None:
    """Of an imported module; the package's name for a name of the public face; None: it is not ours."""
    head, _, rest = module.partition(".")
    if not (SRC / head).is_dir():
        return None
    inside = rest.partition(".")[0]
    is_layer = (PACKAGE / inside).exists() or any(PACKAGE.glob(f"{inside}.*"))
    return inside if head == PACKAGE.name and inside and is_layer else head


def test_layers_import_only_what_the_table_allows() -> None:
    for path in _sources():
        layer = _layer(path)
        assert layer in MAY_IMPORT, f"{layer} is not in the table of layers"
        allowed = MAY_IMPORT[layer] | {layer}
        for module in _imports(path):
            target = _layer_of(module)
            assert target is None or target in allowed, (
                f"{path.relative_to(SRC)} imports {module}; {layer} may import {sorted(allowed)}")


def _import_graph(base: Path) -> dict[str, set[str]]:
    """Each module below `base` with those there that its text imports: at its top, inside of functions, for types.

    A package is its own `__init__.py`: that importing `a.b` runs the one of `a` first is no import in the text.
    """
    modules = {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for path in _sources(base)
    }
    native = {f"{PACKAGE.name}._native"}  # a module of its own, though it is no file
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted = [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                wanted = [(f"{node.module}.{alias.name}", node.module or "") for alias in node.names]
            else:
                continue
            for module, package in wanted:
                target = module if module in modules or module in native else package
                graph[name] |= {target} & modules.keys() - {name}
    return graph


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, the shortest ring first found; none where there is none."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        ends = {name for name, targets in left.items() if not targets}
        if not ends:
            break
        left = {name: targets - ends for name, targets in left.items() if name not in ends}
    rings = []
    for name in left:  # on a ring, or above one
        paths = [[name]]
        seen = {name}
        while paths:
            path = paths.pop(0)
            if name in left[path[-1]]:
                rings.append([*path, name])
                break
            paths += [[*path, target] for target in sorted(left[path[-1]] - seen)]
            seen |= left[path[-1]]
    return min(rings, key=len, default=[])


def test_no_modules_import_each_other() -> None:
    assert not _cycle(_import_graph(SRC)), " imports ".join(_cycle(_import_graph(SRC)))


@pytest.mark.parametrize(
    "importing",
    ["from flowstone import a", "import flowstone.a", "def later():\n    from flowstone.a import one",
     "if TYPE_CHECKING:\n    from flowstone.a import One"],
)
def test_rings_of_imports_are_found_wherever_they_stand(importing: str, tmp_path: Path) -> None:
    package = tmp_path / "flowstone"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from flowstone.b import two")
    (package / "b.py").write_text("from flowstone import c")
    (package / "c.py").write_text("from flowstone import _native")
    assert _cycle(_import_graph(tmp_path)) == []
    (package / "c.py").write_text(importing)
    assert set(_cycle(_import_graph(tmp_path))) == {"flowstone.a", "flowstone.b", "flowstone.c"}


def test_torch_stays_where_it_is_needed() -> None:
    for path in _sources():
        if any(module.partition(".")[0] == "torch" for module in _imports(path)):
            name = str(path.relative_to(PACKAGE if PACKAGE in path.parents else SRC))
            assert _layer(path) in TORCH_ALLOWED, f"{name} imports torch"
            assert name not in WITHOUT_TORCH, f"{name} imports torch"


def test_plan_is_pure() -> None:
    for path in _sources(PACKAGE / "plan"):
        heads = {module.partition(".")[0] for module in _imports(path)}
        assert not heads & PURE_FORBIDDEN, f"{path.name} imports {sorted(heads & PURE_FORBIDDEN)}"


def test_nobody_pickles() -> None:
    banned = re.compile(r"\b(pickle|marshal|shelve|dill|cloudpickle)\b|torch\.load\(|(?<!\w)eval\(|(?<!\w)exec\(")
    for path in _sources():
        if _layer(path) == "flowstone_demo":
            continue  # it times torch.save against us
        code = re.sub(r'""".*?"""|#.*', "", path.read_text(), flags=re.DOTALL)
        assert not banned.search(code), f"{path.name} uses {banned.search(code)}"


@functools.cache
def _functions(path: Path) -> list[tuple[str, int, list[str]]]:
    """The name of each, its lines, and its parameters."""
    return [
        (n.name, (n.end_lineno or n.lineno) - n.lineno + 1,
         [a.arg for a in (*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs)])
        for n in ast.walk(_tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("folder", ["src", "tests", "bench"])
def test_functions_and_files_stay_short(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        long = [f"{name} ({lines})" for name, lines, _ in _functions(path) if lines > FUNCTION_LINES_MAX]
        assert not long, f"{path.relative_to(ROOT)}: over {FUNCTION_LINES_MAX} lines: {', '.join(long)}"
        lines = len(path.read_text().splitlines())
        assert lines <= FILE_LINES_MAX[folder], f"{path.relative_to(ROOT)} has {lines} lines"


def test_a_checkpointer_is_lifecycle_and_verbs() -> None:
    assert len((SRC / "flowstone/checkpointer.py").read_text().splitlines()) < 250, "what the verbs do is in pipeline/"


PARAMETERS_MAX = 7
OPTIONS = {
    ("checkpointer.py", "__init__"), ("bench.py", "io"), ("writer.py", "__init__"), ("export.py", "export"),
    ("import_.py", "import_"), ("importing.py", "import_checkpoint"), ("diff.py", "diff"), ("store.py", "__init__"),
}
"""Whose parameters are the options of the public face, each with a default, named by the caller."""


def test_parameter_lists_stay_short() -> None:
    for path in _sources():
        for function, _, names in _functions(path):
            if (path.name, function) not in OPTIONS:
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                assert count <= PARAMETERS_MAX, f"{path.relative_to(SRC)}: {function} has {count} parameters"


def test_native_files_stay_short() -> None:
    for path in sorted((ROOT / "native").rglob("*.[ch]*")):
        folder, lines = "tests" if path.parent.name == "tests" else "native", len(path.read_text().splitlines())
        assert lines <= FILE_LINES_MAX[folder], f"{path.relative_to(ROOT)} has {lines} lines"


def test_native_core_links_neither_torch_nor_cuda() -> None:
    for path in sorted((ROOT / "native").rglob("*.[ch]*")):
        text = path.read_text()
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|cuda)', text), f"{path.name} includes torch or CUDA"
        if not path.name.startswith("bind"):  # the binding, and what its files share
            assert not re.search(r'#include\s*[<"](Python\.h|nanobind)', text), f"{path.name} includes Python"


MUTABLE = {
    "Lock", "RLock", "Condition", "Event", "local", "count", "cycle", "deque", "defaultdict", "Counter", "list", "dict",
    "set", "bytearray", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "SimpleNamespace", "ThreadPoolExecutor",
}
"""Types with mutable state; in a module, all its users would share it."""


def test_nothing_imports_masked_arrays() -> None:
    """np.unique does, when it is asked for the values alone."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.unique":
                assert any((word.arg or "").startswith("return_") for word in node.keywords), f"{path}: use distinct()"


def test_modules_have_docstrings_and_no_mutable_globals() -> None:
    for path in _sources():
        tree = _tree(path)
        assert ast.get_docstring(tree), f"{path.relative_to(SRC)} has no docstring"
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.List | ast.Dict | ast.Set) and not ast.unparse(value).strip("[]{}")
            made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MUTABLE
            is_mutable = empty or made
            assert not is_mutable, f"{path.relative_to(SRC)}:{node.lineno} is mutable state of a module"
            for inner in ast.walk(node):
                assert not isinstance(inner, ast.Global), f"{path.relative_to(SRC)}:{inner.lineno} changes its module"


RETIRED = re.compile(
    r"\b(strands?|Scissors|poured|Dealt|index_of_team|[Ss]pine|unseal|astray|[Pp]ulses?|Hearing|Heard|"
    r"Together|team|Passing|Neighbours?|Landing|Landed|strewn|hurry|hurries|[Ll]eisures?|Means|[Ss]urvey|"
    r"[Ll]edger|Drawn|[Aa]natomy|keeper|Flight|withdraw|unsound|seams?|Troubles|[Ss]torm|redeal)\b"
)
"""Private pictures that have given way to the field's words, in code and in what is said about it."""


@pytest.mark.parametrize("folder", ["src", "native", "docs"])
def test_retired_words_do_not_come_back(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".pyi", ".md", ".h", ".cpp") or path.parent.name == "performance":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = RETIRED.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number} says {found}: a retired word"


PERSONS = re.compile(r"\b(nobody|whoever)\b", re.IGNORECASE)
"""Pronouns for persons: comments and docstrings say which thread, rank, process or object they mean."""


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of a file's comments and docstrings; every line of a document."""
    text = path.read_text()
    if path.suffix in (".h", ".cpp"):
        yield from ((n, line.partition("//")[2]) for n, line in enumerate(text.splitlines(), 1))
    elif path.suffix in (".py", ".pyi"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
        for node in ast.walk(_tree(path)):
            said = node.value if isinstance(node, ast.Expr) else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                yield from enumerate(said.value.splitlines(), said.lineno)
    else:
        yield from enumerate(text.splitlines(), 1)


@pytest.mark.parametrize("folder", ["src", "native", "docs"])
def test_comments_have_no_pronouns_for_persons(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".pyi", ".md", ".h", ".cpp"):
            for number, line in _comments(path):
                found = PERSONS.search(line)
                assert not found, f"{path.relative_to(ROOT)}:{number} says {found}: name the thread, rank or object"


def test_the_repository_speaks_of_the_project_only() -> None:
    banned = re.compile(r"/root/|/home/\w+|/work/|localhost:\d|pypi\.org|deb\.debian\.org", re.IGNORECASE)
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *_sources(), *ROOT.glob("bench/**/*.py")]
    for path in files:
        found = banned.search(path.read_text())
        assert not found, f"{path.relative_to(ROOT)} says {found}"


def test_no_two_test_files_have_one_name() -> None:
    """A run of all of them would import the first for both."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py") if "integrations" not in path.parts]
    assert sorted({name for name in names if names.count(name) > 1}) == []
