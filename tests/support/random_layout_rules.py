"""Random layout rules, drawn by hypothesis, and a reference implementation of them in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import flowstone as fs
from flowstone.layouts.layout_rules import LayoutRule

Arrays = dict[str, np.ndarray]


def parts_of(rule: fs.Split | fs.Fuse, side: int) -> list[int]:
    return [side // sum(rule.parts) * part for part in rule.parts]


def expected(rule: LayoutRule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The result of a rule, by numpy alone."""
    x = arrays[0]
    if isinstance(rule, fs.Transpose):
        return [x.transpose(rule.axes)]
    if isinstance(rule, fs.Pad):
        width = [(0, rule.padded - rule.size if dim == rule.dim else 0) for dim in range(x.ndim)]
        return [np.pad(x, width)]
    if isinstance(rule, fs.Unpad):
        return [np.take(x, np.arange(rule.size), rule.dim)]
    if isinstance(rule, fs.Stack):
        return [np.stack(arrays, rule.dim)]
    if isinstance(rule, fs.Unstack):
        return [np.take(x, index, rule.dim) for index in range(x.shape[rule.dim])]
    if isinstance(rule, fs.Split):
        sizes = [size // rule.groups for size in parts_of(rule, x.shape[rule.dim])]
        grouped = np.moveaxis(x, rule.dim, 0)
        grouped = grouped.reshape(rule.groups, sum(sizes), *grouped.shape[1:])
        cut = np.split(grouped, np.cumsum(sizes)[:-1], axis=1)
        return [np.moveaxis(part.reshape(-1, *part.shape[2:]), 0, rule.dim) for part in cut]
    moved = [np.moveaxis(array, rule.dim, 0) for array in arrays]
    joined = np.concatenate([tensor.reshape(rule.groups, -1, *tensor.shape[1:]) for tensor in moved], axis=1)
    return [np.moveaxis(joined.reshape(-1, *joined.shape[2:]), 0, rule.dim)]


@st.composite
def rules_and_shapes(draw: st.DrawFn) -> tuple[LayoutRule, dict[str, tuple[int, ...]]]:
    """A rule, and the tensors that it applies to."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["split", "fuse", "transpose", "pad", "unpad", "stack", "unstack"]))
    if kind in ("split", "fuse"):
        groups = draw(st.integers(1, 4))
        parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        unit = groups * draw(st.integers(1, 3))
        names = tuple(f"b.{{n}}.p{index}" for index in range(len(parts)))
        if kind == "split":
            shape[dim] = unit * sum(parts)
            return fs.Split("a.{n}.w", names, dim, tuple(parts), groups), {"a.7.w": tuple(shape)}
        shapes = {f"b.7.p{index}": (*shape[:dim], unit * part, *shape[dim + 1 :]) for index, part in enumerate(parts)}
        return fs.Fuse(names, "a.{n}.w", dim, tuple(parts), groups), shapes
    if kind == "transpose":
        axes = tuple(draw(st.permutations(range(len(shape)))))
        return fs.Transpose("a.{n}.w", axes), {"a.7.w": tuple(shape)}
    if kind in ("pad", "unpad"):
        more = draw(st.integers(0, 4))
        before = shape[dim] if kind == "pad" else shape[dim] + more
        rule = (fs.Pad if kind == "pad" else fs.Unpad)("a.{n}.w", shape[dim], shape[dim] + more, dim)
        return rule, {"a.7.w": (*shape[:dim], before, *shape[dim + 1 :])}
    if kind == "stack":
        count = draw(st.integers(1, 12))
        where = draw(st.integers(0, len(shape)))
        return fs.Stack("a.{n}.e{e}", "a.{n}.w", where), {f"a.7.e{index}": tuple(shape) for index in range(count)}
    return fs.Unstack("a.{n}.w", "a.{n}.e{e}", dim), {"a.7.w": tuple(shape)}


def natural(name: str) -> list[object]:
    return [name.rstrip("0123456789"), int("".join(c for c in name.rpartition(".")[2] if c.isdigit()) or 0)]


def next_rule(draw: st.DrawFn, arrays: Arrays, number: int) -> LayoutRule | fs.Rename:
    """A rule that can be applied to one or two of these tensors."""
    name = draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    dim = draw(st.integers(0, max(0, array.ndim - 1)))
    alike = sorted(other for other in arrays if arrays[other].shape == array.shape and other != name)
    fitting: list[LayoutRule | fs.Rename] = [fs.Rename(name, f"r{number}"), fs.Transpose(name, tuple(
        draw(st.permutations(range(array.ndim)))))]
    if array.ndim:
        side = array.shape[dim]
        fitting.append(fs.Pad(name, side, side + 2, dim))
        fitting += [fs.Split(name, (f"s{number}.a", f"s{number}.b"), dim, groups=groups)
                    for groups in (1, 2, 3) if side % (2 * groups) == 0]
        fitting += [fs.Fuse((name, other), f"f{number}", dim, groups=groups)
                    for groups in (1, 2) for other in alike[:1] if side % groups == 0]
        if side < 8:
            fitting.append(fs.Unstack(name, f"u{number}.{{e}}", dim))
    stacked = {array: array.rpartition(".")[0] for array in arrays if array.startswith("u")}
    if stacked:
        prefix = draw(st.sampled_from(sorted(stacked.values())))
        there = sorted(key.rpartition(".")[2] for key, of in stacked.items() if of == prefix)
        if there == [str(i) for i in range(len(there))] and len({arrays[f"{prefix}.{e}"].shape for e in there}) == 1:
            fitting.append(fs.Stack(f"{prefix}.{{e}}", f"k{number}", 0))
    return draw(st.sampled_from(fitting))


def by_numpy(rule: LayoutRule | fs.Rename, arrays: Arrays) -> Arrays:
    """All tensors after a rule, by numpy."""
    left = dict(arrays)
    if isinstance(rule, fs.Rename):
        left[rule.target] = left.pop(rule.source)
    elif isinstance(rule, fs.Fuse):
        left[rule.target] = expected(rule, [left.pop(source) for source in rule.sources])[0]
    elif isinstance(rule, fs.Split):
        left |= dict(zip(rule.targets, expected(rule, [left.pop(rule.source)]), strict=True))
    elif isinstance(rule, fs.Unstack):
        made = expected(rule, [left.pop(rule.source)])
        left |= {rule.target.replace("{e}", str(index)): arena for index, arena in enumerate(made)}
    elif isinstance(rule, fs.Stack):
        names = [name for name in sorted(left) if name.startswith(rule.source.removesuffix("{e}"))]
        left[rule.target] = expected(rule, [left.pop(name) for name in names])[0]
    else:
        left[rule.name] = expected(rule, [left[rule.name]])[0]
    return left


@st.composite
def rules_in_a_row(draw: st.DrawFn, arrays: Arrays) -> tuple[list[Any], Arrays]:
    """Up to six rules, and the arrays after them."""
    rules: list[Any] = []
    expected = dict(arrays)
    for number in range(draw(st.integers(1, 6))):
        rules.append(next_rule(draw, expected, number))
        expected = by_numpy(rules[-1], expected)
    return rules, expected
