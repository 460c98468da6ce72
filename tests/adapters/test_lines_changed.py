"""In every framework, Flowstone changes at most three lines of an existing training script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LINES_MAX = 3
LINES = {
    ("DCP.md", ""): 3,
    ("DEEPSPEED.md", "deepspeed"): 1,
    ("DEEPSPEED.md", "deepspeed-slot"): 1,
    ("LIGHTNING.md", "trainer"): 1,
    ("LIGHTNING.md", "fabric"): 2,
    ("LIGHTNING.md", "sharded"): 2,
    ("LIGHTNING.md", "sharded-fabric"): 2,
    ("LOADERS.md", "torchdata"): 1,
    ("LOADERS.md", "datasets"): 1,
    ("LOADERS.md", "streaming"): 1,
    ("MEGATRON.md", "megatron"): 3,
    ("MEGATRON.md", "megatron-registered"): 2,
    ("RAY.md", "ray-train"): 3,
    ("TORCHFT.md", "torchft"): 3,
    ("TORCHTITAN.md", "torchtitan"): 1,
    ("TRANSFORMERS.md", "trainer"): 2,
    ("TRANSFORMERS.md", "trl"): 2,
    ("TRANSFORMERS.md", "accelerate"): 2,
    ("TRANSFORMERS.md", "peft"): 1,
}
"""Of each page's sample that trains, how many lines have to do with Flowstone, imports aside."""
PAGES = {page for page, _ in LINES}


def names_of_adapters() -> set[str]:
    """What adapters have for scripts."""
    names: set[str] = set()
    for path in (ROOT / "src/flowstone/adapters").glob("*/__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
    return names


def sample(page: str, name: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    match = re.search(rf"^```python{' ' if name else ''}{name}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert match, f"{page} has no sample {name!r}"
    return match[1]


def statements(node: ast.AST) -> Iterator[tuple[ast.stmt, list[ast.AST]]]:
    """Each statement, with what stands in it, and not in the statements of its body."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            own: list[ast.AST] = []
            left = [child for child in ast.iter_child_nodes(child) if not isinstance(child, ast.stmt)]
            while left:
                own.append(left.pop())
                left += [child for child in ast.iter_child_nodes(own[-1]) if not isinstance(child, ast.stmt)]
            yield child, own
            yield from statements(child)


def is_told_otherwise(node: ast.AST) -> bool:
    """What is Flowstone's by a word: torchft's Manager without functions of its own, Megatron's name of a strategy."""
    return (isinstance(node, ast.keyword) and node.arg == "state_dict") or (
        isinstance(node, ast.Constant) and node.value == "flowstone"
    )


def is_of_a_class(statement: ast.stmt, names: set[str]) -> bool:
    """Whether it makes an object of a class of Flowstone's; what its functions return stays the framework's."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    called = ast.unparse(statement.value.func).split(".")
    return called[0] in names and called[-1][0].isupper()


def changed(text: str) -> list[int]:
    """Lines of statements that name something of Flowstone's, or an object of one of its classes."""
    names, lines = names_of_adapters(), []
    for statement, within in statements(ast.parse(text)):
        if isinstance(statement, ast.ImportFrom | ast.Import):
            if ast.unparse(statement).split()[1].startswith("flowstone"):
                names |= {alias.asname or alias.name for alias in statement.names}
            continue
        used = {node.id for node in within if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        if not used & names and not any(map(is_told_otherwise, within)):
            continue
        lines.append(statement.lineno)
        if isinstance(statement, ast.With) or is_of_a_class(statement, names):
            names |= {node.id for node in within if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return lines


@pytest.mark.parametrize(("page", "name"), LINES)
def test_at_most_three_lines_change(page: str, name: str) -> None:
    actual = changed(sample(page, name))
    assert len(actual) == LINES[page, name], f"lines {actual}"
    assert len(actual) <= LINES_MAX


def test_no_sample_that_trains_is_left_out() -> None:
    for page in sorted(PAGES - {"DCP.md"}):
        text = (ROOT / "docs" / page).read_text()
        for name, body in re.findall(r"^```python ([\w-]+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            reads = name.endswith(("reads", "reading", "-exported", "-run", "-cluster"))
            assert reads or (page, name) in LINES, f"{page}: {name}"
            assert reads or changed(body)


def test_the_count_sees_what_is_of_flowstone() -> None:
    text = (
        "import flowstone as fs\nfrom flowstone.adapters.ray import load\nimport torch\nstate = {'rng': fs.rng()}\n"
        "with fs.Checkpointer('a') as ckpt:\n    load(ckpt, state)\n    for step in range(3):\n        train(step)\n"
        "        ckpt.save(step, state)\ntrainer = use_flowstone(Trainer())\ntrainer.train()\n"
        "writer = FlowstoneWriter()\nsave(writer)\n"
    )
    assert changed(text) == [4, 5, 6, 9, 10, 12, 13]
