"""The modules that a source file imports."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache  # several tests ask for each file
def module_imports(path: Path) -> list[str]:
    """Modules and names that a file imports, dotted, wherever the import stands; without those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    imports = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
    return imports
