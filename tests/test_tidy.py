"""The rules of this source tree, as ordinary tests over the source."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from module_imports import module_imports

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PACKAGE = SRC / "flowstone"

# Layer -> what it imports of ours. A layer is a module or a folder of src/flowstone; those that it imports stand
# above it here. `extensions` is how the core reaches options (tests/test_options.py).
_DISK = {"config", "errors", "table", "format", "store"}
_MEMORY = _DISK | {"log", "plan", "stage", "_native"}
_VERBS = {"config", "errors", "extensions", "log", "trace", "store", "state", "reading", "runtime", "session"}
MAY_IMPORT: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "log": set(),  # lines of the log, from any thread
    "config": {"errors"},  # what an option cannot be
    "events": set(),
    "rules": {"errors"},
    "extensions": {"errors"},
    "trace": {"errors"},
    "cluster": {"errors", "_version"},
    "table": {"config", "errors"},  # the length of a chunk
    "runtime": {"errors", "events", "log"},
    "ranks": {"config", "errors", "log", "runtime"},
    "format": {"config", "errors", "table", "_native"},
    "plan": {"config", "errors", "table", "rules", "format"},
    "state": {"config", "errors", "extensions", "log", "table", "format"},
    "store": {"config", "errors", "extensions", "log", "format", "_version", "_native"},
    "stores": {"config", "errors", "extensions", "rules", "store"},
    "commit": {"config", "errors", "extensions", "log", "table", "format", "store", "_native"},
    "stage": {"config", "errors", "extensions", "log", "table", "format", "plan", "store", "state", "_native"},
    "providers": {"config", "errors", "table", "format", "state"},
    "torch": _MEMORY | {"state", "providers"},
    "reading": _DISK | {"extensions", "rules", "cluster", "plan", "state", "stores", "commit", "stage"},
    "session": {"config", "errors", "format", "state", "store", "ranks", "reading", "runtime"},
    "coordination": _DISK | {"log", "plan", "commit", "ranks", "_version"},
    "delta": _MEMORY | {"commit", "coordination", "reading", "session"},
    "codecs": _MEMORY | {"events", "extensions", "rules", "state", "coordination"},
    "layouts": {"config", "errors", "table", "rules", "format", "plan"},
    "save": _MEMORY | _VERBS | {"events", "ranks", "commit", "coordination"},
    "load": _MEMORY | _VERBS | {"events", "rules", "ranks", "commit"},
    "inspection": (_DISK - {"store"}) | {"plan", "stores", "ranks", "reading"},
    "node_reads": _MEMORY | {"ranks", "reading"},
    "journal": _DISK | _VERBS | {"events", "ranks", "commit", "stage", "save", "torch", "_native", "_version"},
    "tiered": (_MEMORY - {"plan"}) | {"events", "stores", "ranks", "commit", "reading", "runtime", "session", "load"},
    "state_dict_verbs": {"config", "errors", "extensions", "trace", "store", "stores", "commit", "reading", "runtime"},
    "strategies": {"extensions", "trace", "commit", "runtime", "session", "save", "load"},
    "checkpointer": _VERBS | {"events", "stores", "ranks", "save", "state_dict_verbs", "strategies"},
    "agent": {"config", "errors", "format", "store", "commit", "tiered", "runtime", "_version"},  # outlives a job
    "replica": (_VERBS - {"extensions"}) | {  # the process that has a state, too
        "ranks", "commit", "save", "journal", "checkpointer", "torch", "_native"
    },
    "adapters": _MEMORY | {  # public verbs; some save as a loop does
        "events", "runtime", "cluster", "state", "stores", "commit", "reading", "session", "coordination",
        "checkpointer", "torch", "_version"
    },
    "convert": _DISK | {"rules", "cluster", "plan", "stores", "commit", "reading", "layouts", "_native", "_version"},
    "cli": (_DISK - {"table"}) | {
        "rules", "cluster", "extensions", "stores", "runtime", "commit", "reading", "convert", "tiered", "_version",
        "flowstone_demo", "flowstone_study"
    },
    "__init__": {"config", "errors", "events", "extensions", "rules", "_version"},
    "__main__": {"extensions"},
    "flowstone_study": (_MEMORY - {"log"}) | {"commit", "_version"},
    "flowstone_demo": {"flowstone", "events", "commit"},  # the names of what a killed save leaves
}
# Where torch is imported: files, or folders, of the package. All else runs without it (tests/test_without_torch.py).
TORCH_ALLOWED = (
    "torch/", "journal/", "replica/joined_job.py", "adapters/", "flowstone_demo/",
)
PURE_FORBIDDEN = {"os", "time", "socket", "threading", "pathlib", "random", "torch", "io", "shutil"}

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = {"src": 520, "bench": 500, "native": 650, "tests": 600}


def _sources(base: Path = SRC) -> list[Path]:
    return sorted(base.rglob("*.py"))


def _layer(path: Path) -> str:
    """A module or folder of the package; or a package beside it, which users of the library never import."""
    package, *rest = path.relative_to(SRC).parts
    return rest[0].removesuffix(".py") if package == PACKAGE.name else package


@functools.cache  # several tests ask for each file
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _layer_of(module: str) -> str | None:
    """Of an imported module; the package's name for a name of the public face; None: it is not ours."""
    head, _, rest = module.partition(".")
    if not (SRC / head).is_dir():
        return None
    inside = rest.partition(".")[0]
    is_layer = (PACKAGE / inside).exists() or any(PACKAGE.glob(f"{inside}.*"))
    return inside if head == PACKAGE.name and inside and is_layer else head


def test_layers_import_just_what_the_table_says() -> None:
    unused = {layer: set(layers) for layer, layers in MAY_IMPORT.items()}
    for path in _sources():
        layer = _layer(path)
        assert layer in MAY_IMPORT, f"{layer} is not in the table of layers"
        allowed = MAY_IMPORT[layer] | {layer}
        for module in module_imports(path):
            target = _layer_of(module)
            assert target is None or target in allowed, (
                f"{path.relative_to(SRC)} imports {module}; {layer} may import {sorted(allowed)}")
            unused[layer].discard(target or "")
    assert not (left := {layer: layers for layer, layers in unused.items() if layers}), f"remove from the table: {left}"


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
                expected = [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                expected = [(f"{node.module}.{alias.name}", node.module or "") for alias in node.names]
            else:
                continue
            for module, package in expected:
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
        if any(module.partition(".")[0] == "torch" for module in module_imports(path)):
            name = str(path.relative_to(PACKAGE if PACKAGE in path.parents else SRC))
            assert name.startswith(TORCH_ALLOWED), f"{name} imports torch"


def test_plan_is_pure() -> None:
    for path in _sources(PACKAGE / "plan"):
        heads = {module.partition(".")[0] for module in module_imports(path)}
        assert not heads & PURE_FORBIDDEN, f"{path.name} imports {sorted(heads & PURE_FORBIDDEN)}"


def test_a_name_that_is_imported_only_for_types_is_not_in_all() -> None:
    for path in _sources():
        tree = _tree(path)
        for_types = {
            alias.asname or alias.name for block in tree.body if isinstance(block, ast.If)
            for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        has_getattr = any(name == "__getattr__" for name, _, _ in _functions(path))  # which imports them
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and not has_getattr:
                assert not for_types & {*ast.literal_eval(node.value)}, f"{path.relative_to(SRC)}: __all__"


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
    assert len((SRC / "flowstone/checkpointer.py").read_text().splitlines()) < 260, "what they do is in save/ and load/"


@pytest.mark.parametrize("folder", ["save", "load"])
def test_conductors_stay_short(folder: str) -> None:
    assert len((PACKAGE / folder / "conductor.py").read_text().splitlines()) < 250, "it has the order, and nothing else"


PARAMETERS_MAX = 7
PUBLIC_SIGNATURES = {
    ("adapters/dcp/writer.py", "__init__"), ("checkpointer.py", "__init__"), ("store/peers/store.py", "__init__"),
    ("cli/bench.py", "io"), ("cli/diff.py", "diff"), ("cli/export.py", "export"), ("cli/import_.py", "import_"),
    ("convert/diff.py", "diff"), ("convert/export.py", "export"), ("convert/importing.py", "import_checkpoint"),
}
"""Whose parameters are the options of the public face, each with a default, named by the caller."""


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Names without a public meaning that a file takes from modules of Python's library."""
    own = {name for name in sys.stdlib_module_names if not name.startswith("_")}
    modules = {
        alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        if alias.name.partition(".")[0] in own
    }
    for node in ast.walk(tree):
        pairs: list[tuple[str, str]] = []
        if isinstance(node, ast.Attribute):
            pairs = [(ast.unparse(node.value), node.attr)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            pairs = [(ast.unparse(node.args[0]), str(getattr(node.args[1], "value", "")))]
        for module, name in pairs:
            if module in modules and name.startswith("_") and not name.startswith("__"):
                yield f"{module}.{name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in own:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))


def test_one_file_takes_private_names_of_python() -> None:
    for path in _sources():
        if path != PACKAGE / "runtime/interpreter.py":
            private = sorted({*_private_names(_tree(path))} - {"os._exit"})  # which is documented
            assert not private, f"{path.relative_to(SRC)} takes {', '.join(private)}: see runtime/interpreter.py"


def test_private_names_of_python_are_found() -> None:
    text = "import sys\nfrom threading import _a\nsys._b()\ngetattr(sys, '_c', None)\nsys.__doc__\nself._d\n"
    assert sorted(_private_names(ast.parse(text))) == ["sys._b", "sys._c", "threading._a"]


def test_parameter_lists_stay_short() -> None:
    long = {
        (str(path.relative_to(PACKAGE if PACKAGE in path.parents else SRC)), function)
        for path in _sources() for function, _, names in _functions(path)
        if len(names) - (names[:1] in (["self"], ["cls"])) > PARAMETERS_MAX
    }
    assert long == PUBLIC_SIGNATURES, f"functions with over {PARAMETERS_MAX} parameters"


def test_native_files_stay_short() -> None:
    for path in sorted((ROOT / "native").rglob("*.[ch]*")):
        folder = "tests" if "tests" in path.relative_to(ROOT).parts else "native"
        lines = len(path.read_text().splitlines())
        assert lines <= FILE_LINES_MAX[folder], f"{path.relative_to(ROOT)} has {lines} lines"


def test_native_core_links_neither_torch_nor_cuda() -> None:
    for path in sorted((ROOT / "native").rglob("*.[ch]*")):
        text = path.read_text()
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|cuda)', text), f"{path.name} includes torch or CUDA"
        if path.parent.name != "bind" and path.name != "bind_delayed_device.cpp":
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


_DEEPSPEED = "DeepSpeed has no other place for these methods"
_MARK = "a function that replaces or wraps another one is marked, so that it is recognized"
_FINALIZE = "the one setting of weakref.finalize"
ASSIGNED_ATTRIBUTES = {
    ("adapters/class_override.py", "__class__"): "one object, not all of its class, gets other methods",
    ("adapters/class_override.py", "_flowstone"): "what these methods use",
    ("adapters/dcp/staged_copies.py", "__reduce_ex__"): "pickle's; the tensor's class is torch's",
    ("adapters/dcp/staged_copies.py", "_device"): "torch's placements have no method for it",
    ("adapters/dcp/writer.py", "storage_data"): "StorageWriter.finish fills it in",
    ("adapters/dcp/writer.py", "storage_meta"): "StorageWriter.finish fills it in",
    ("adapters/deepspeed/attaching.py", "checkpoint_engine"): _DEEPSPEED,
    ("adapters/deepspeed/attaching.py", "load_checkpoint"): _DEEPSPEED,
    ("adapters/deepspeed/attaching.py", "save_checkpoint"): _DEEPSPEED,
    ("adapters/deepspeed/merged_weights.py", "torch"): "zero_to_fp32 reads files by the name torch of its module",
    ("adapters/deepspeed/other_ranks.py", "_get_all_ckpt_names"): _DEEPSPEED,
    ("adapters/deepspeed/plugin.py", "of_deepspeed"): _MARK,
    ("adapters/deepspeed/slot.py", "_configure_checkpointing"): _DEEPSPEED,
    ("adapters/deepspeed/slot.py", "cleanup"): _DEEPSPEED,
    ("adapters/deepspeed/slot.py", "get_commit_info"): _DEEPSPEED,
    ("adapters/deepspeed/slot.py", "of_deepspeed"): _MARK,
    ("adapters/huggingface/accelerator.py", "iteration"): "Accelerator.save_state counts it up",
    ("adapters/huggingface/accelerator.py", "step"): "Accelerator.load_state restores it",
    ("adapters/huggingface/run.py", "best_model_checkpoint"): "Trainer sets it when it saves",
    ("adapters/huggingface/sections.py", "stateful_callbacks"): "Trainer sets it when it saves",
    ("adapters/loaders/streaming_dataloader.py", "next_epoch"): "StreamingDataset keeps its own otherwise",
    ("adapters/loaders/streaming_dataloader.py", "num_samples_yielded"): "StreamingDataLoader counts on otherwise",
    ("torch/streaming.py", "atexit"): _FINALIZE,
    ("journal/replayer.py", "grad"): "torch's optimizers read it",
    ("journal/replayer.py", "name"): "grad_scale and found_inf, which torch's fused optimizers read",
    ("log.py", "args"): "as logging.handlers.QueueHandler does",
    ("log.py", "msg"): "as logging.handlers.QueueHandler does",
    ("stage/fence.py", "_OURS"): _MARK,
    ("state/classes.py", "name"): "fields of a user's object",
    ("state/kinds/generator.py", "state"): "numpy's generators have no method for it",
    ("torch/fsdp1.py", "_prefetched"): "the next forward gathers anew",
    ("torch/optimizer_rebuild.py", "state"): "torch's optimizers have no method for it",
    ("torch/quantised.py", "_transpose_invalid"): "TransformerEngine computes the transpose anew",
    ("store/objects/file_system.py", "closed"): "fsspec's files have no other way to be discarded",
    ("store/objects/uploads.py", "atexit"): _FINALIZE,
    ("store/peers/erasure.py", "argtypes"): "the types of a C function, for ctypes",
}
"""The attributes of other libraries' objects that we assign, each with its reason. An object of ours is changed by its
own methods only; what one object may call on another, it is given at construction."""


def _is_made(value: ast.expr | None) -> bool:
    """Whether an expression constructs an object: `Class(...)`, `cls(...)`, `...__new__(...)`, or a copy."""
    name = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return name.lstrip("_")[:1].isupper() or name in ("cls", "__new__", "replace", "copy", "deepcopy")


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target of an assignment with its value; those of tuples one by one, their values being unknown."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple):
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                    yield from zip(target.elts, values, strict=False)
                else:
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            yield node.target, node.value


def _set_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """What calls of `setattr` and `__setattr__` assign; where an attribute's name is a variable, the variable's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "__setattr__"):
            *owner, attribute, _ = node.args
            name = attribute.value if isinstance(attribute, ast.Constant) else ast.unparse(attribute)
            if owner:  # else a method of the object itself
                yield ast.copy_location(ast.Attribute(owner[0], str(name)), node)


def _foreign_assignments(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Assigned attributes of objects that are neither `self` nor always made in the same function."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function) if node is not function}
    for function in [node for node in functions if id(node) not in inner]:
        pairs = list(_assignments(function))
        names = [(target.id, _is_made(value)) for target, value in pairs if isinstance(target, ast.Name)]
        own = {"self", "cls"} | {name for name, is_made in names if is_made and (name, False) not in names}
        for target in (*(target for target, _ in pairs), *_set_attributes(function)):
            is_own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in own
            if isinstance(target, ast.Attribute) and not is_own:
                yield target


def test_no_object_assigns_attributes_of_another_one() -> None:
    assigned = {
        (str(path.relative_to(PACKAGE)), target.attr): f"line {target.lineno}: {ast.unparse(target)}"
        for path in _sources(PACKAGE) for target in _foreign_assignments(_tree(path))
    }
    new = [f"{file}, {assigned[file, name]}" for file, name in assigned.keys() - ASSIGNED_ATTRIBUTES.keys()]
    assert not new, f"let a method of that object do it: {'; '.join(sorted(new))}"
    assert not ASSIGNED_ATTRIBUTES.keys() - assigned.keys(), "these are assigned no more: remove them from the table"


def test_assignments_to_attributes_of_others_are_found() -> None:
    text = """
class A:
    def run(self, other):
        made = Other()
        made.x = self.x = 1
        other.x, y = 1, 2
        found = other.one()
        found.x += 1
        self.part.x: int = 3
        def inner():
            made.z = 4
        setattr(made, name, 1)
        object.__setattr__(self, "x", 1)
        old = other
        if not old:
            old = Other()
        old.x = 1
        setattr(other, "y", 1)
        later(lambda: object.__setattr__(self.part, name, 1))
"""
    assert [ast.unparse(target) for target in _foreign_assignments(ast.parse(text))] == [
        "other.x", "found.x", "self.part.x", "old.x", "other.y", "self.part.name"
    ]


RETIRED = re.compile(
    r"\b(strands?|Scissors|poured|Dealt|index_of_team|[Ss]pine|unseal|astray|[Pp]ulses?|Hearing|Heard|"
    r"Together|team|Passing|Neighbours?|Landing|Landed|strewn|hurry|hurries|[Ll]eisures?|Means|[Ss]urvey|"
    r"[Ll]edger|Drawn|[Aa]natomy|keeper|Flight|withdraw|unsound|seams?|Troubles|[Ss]torm|redeal|"
    r"Handover|let_go_on|_let_go|_give_back|give_up|go_on|leads_to|led_to|take_acts|take_away|learn_interest|"
    r"has_come_to|comes_to|_will_not_come|within_reach|settle_in|owes_whole|WholeSaves|Unplanned|FarValues|Absence|"
    r"HeldBack|UnderWay|OwnStream|Teller|Spreads|PeerInterest|Acts|specimen|nursery|drawn_rules)\b|"
    r"\b(gives up a step|(is|are) no room at all|is less than none|is no pair of|came to nothing|What comes where)\b"
)
"""Private pictures that have given way to the field's words, in code and in what is said about it."""


@pytest.mark.parametrize("folder", ["src", "native", "docs", "bench", "tools", "examples", "tests"])
def test_retired_words_do_not_come_back(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".pyi", ".md", ".h", ".cpp") or path.parent.name == "performance":
            continue
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = RETIRED.search(line)
            assert not match, f"{path.relative_to(ROOT)}:{number} says {match}: a retired word"


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
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from enumerate(value.value.splitlines(), value.lineno)
    else:
        yield from enumerate(text.splitlines(), 1)


@pytest.mark.parametrize("folder", ["src", "native", "docs"])
def test_comments_have_no_pronouns_for_persons(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".pyi", ".md", ".h", ".cpp"):
            for number, line in _comments(path):
                match = PERSONS.search(line)
                assert not match, f"{path.relative_to(ROOT)}:{number} says {match}: name the thread, rank or object"


def test_the_repository_speaks_of_the_project_only() -> None:
    banned = re.compile(r"/root/|/home/\w+|/work/|localhost:\d|pypi\.org|deb\.debian\.org", re.IGNORECASE)
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *_sources(), *ROOT.glob("bench/**/*.py")]
    for path in files:
        match = banned.search(path.read_text())
        assert not match, f"{path.relative_to(ROOT)} says {match}"


def test_no_two_test_files_have_one_name() -> None:
    """A run of all of them would import the first for both."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py") if "integrations" not in path.parts]
    assert sorted({name for name in names if names.count(name) > 1}) == []


GENERIC = {"at", "found", "one", "those", "room", "what", "wanted", "told", "said"}
GENERIC_MAX = {"src": 1, "bench": 3, "tests": 36, "tools": 0, "examples": 0}
"""How many bindings have such a name today. They say nothing of what they hold: there may only be fewer."""


def _bindings(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("folder", GENERIC_MAX)
def test_generic_bindings_become_fewer(folder: str) -> None:
    count = sum(name in GENERIC for path in _sources(ROOT / folder) for name in _bindings(path))
    assert count <= GENERIC_MAX[folder], "name what it holds: row, offset, entry, step"
    assert count == GENERIC_MAX[folder], f"there are fewer now: lower the limit to {count}"


PARTICIPLES = re.compile(
    r"_?(Held|Kept|Known|Told|Said|Looked|Ended|Led|Moved|Found|Begun|Resting|Seen|Made|Left|Gone|Come|Sent|Taken|"
    r"Given|Wanted|Asked|Drawn|Done|Shown|Settled|Stepped|Stored|Copied|Opened|Planned|Unplanned|Written|Flushed|"
    r"Compressed|Derived|Provided|Loading|Following|Opening|Ending|Meeting|Waiting)"
)
PARTICIPLES_ALLOWED = {"Compressed", "Flushed", "Written"}
"""Events of the public face: each says what has happened."""


def _classes() -> Iterator[tuple[str, Path]]:
    for path in _sources(PACKAGE):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name, path


def test_a_class_name_exists_once() -> None:
    files: dict[str, list[str]] = {}
    for name, path in _classes():
        files.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_class_names_are_nouns() -> None:
    for name, path in _classes():
        is_event = (path.parent.name == "events" or path.stem.endswith("_events")) and name in PARTICIPLES_ALLOWED
        assert is_event or not PARTICIPLES.fullmatch(name), f"{path.relative_to(ROOT)}: name the thing: {name}"
