"""Reads a pickle as a description, and executes nothing: names are looked up in a table, never imported.

A pickle is a program for a stack machine. This module implements the opcodes that build values, and calls only the
functions in a given table. Any other class or function that a pickle names becomes an `Opaque` with that name. The
caller decides what to do with it.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.bounds import SAME_HASH_MAX, checked_keys

KnownFunctions = Mapping[str, Callable[..., object]]
"""The functions that may be called, by their dotted names in pickles."""

_ITEMS_MAX = 1 << 24  # number of opcodes: enough for a checkpoint with a million tensors
_NAME_CHARS_MAX = 1000  # the longest name of a class or function
_DEPTH_MAX = 128  # Flowstone's objects may be nested 100 deep; the rest is for containers around them
# the most values, at any depth, in a tuple that is a key of a dict: each use of the key hashes all of them
_KEY_VALUES_MAX = 1000
_EXPANSION_MAX = 16  # the most values in the result for each opcode; a value that occurs several times counts each time
_EXPANDED_MIN = 1 << 16


class Opaque:
    """A value of an unknown type, or an unknown function. `name`: the dotted name of that type or function."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Global:
    """A name that a pickle refers to, such as a class or a dtype."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PickledInstance:
    """An instance of a known class. `state`: a dict of its fields, or any other state that was pickled."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[object, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None

    state: object

    def fill(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> object:
        """The value of a field of the instance. Raises KeyError if there is no such field."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        value: object = self.state[name]
        return value


class _StackMark:
    pass


def read_pickle(
    content: bytes, functions: KnownFunctions, records: frozenset[str] = frozenset(), *,
    persistent: Callable[[object], object] | None = None, path: str,
) -> object:
    """The value that a pickle describes.

    functions   name -> function that may be called, with arguments from the pickle
    records     names of classes whose instances become a PickledInstance
    persistent  returns the value for a persistent id; None: the pickle must have no such ids

    The result is bounded: it nests at most _DEPTH_MAX deep, and a walk over it takes time proportional to the pickle's
    length, even if it visits a value again each time it occurs.

    raises  DamagedError            the pickle is not valid
            UnsupportedFormatError  there is an opcode that no checkpoint needs, or values nest or repeat without end
    """
    machine = _Machine(functions, records, persistent, path)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number > _ITEMS_MAX:
                raise UnsupportedFormatError(
                    f"{path} has more values than Flowstone reads from a pickle", next="save only the tensors"
                )
            if opcode.name == "STOP":
                value = machine.pop()
                _check_bounded(value, max(_EXPANDED_MIN, _EXPANSION_MAX * number), path)
                return value
            machine.step(opcode.name, argument)
    except UnsupportedFormatError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError(
            f"{path} cannot be read: {error!s:.200}", next="copy the file again, or save it again"
        ) from error
    raise DamagedError(f"{path} ends early", next="copy the file again")


_CONSTANTS: Mapping[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "SHORT_BINSTRING", "BINSTRING", "INT", "LONG", "FLOAT", "UNICODE",
})
_IGNORED = frozenset({"PROTO", "FRAME"})


def hashable(key: object) -> object:
    """Return the key, if it can be hashed in bounded time and depth. Raises ValueError if not."""
    waiting, count = [key], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple | frozenset):
            count += 1 + len(value)
            if count > _KEY_VALUES_MAX:
                raise ValueError(f"a key of a dict consists of more than {_KEY_VALUES_MAX} values")
            waiting += value
    return key


def hashables(keys: Iterable[object]) -> list[object]:
    """Return the keys of a new container, if all can be hashed in bounded time and depth. Raises ValueError if not."""
    return checked_keys(list(map(hashable, keys)))


def items_of(values: object) -> Collection[Any]:
    """The values of a container. Raises ValueError for anything else, such as a huge range."""
    if not isinstance(values, tuple | list | set | frozenset):
        raise ValueError(f"expected a tuple, list or set of values, found a {type(values).__name__}")
    return values


def pairs_of(values: object) -> list[tuple[object, object]]:
    """Keys and values of a list of pairs, or of a dict, as a list of pairs. Raises ValueError."""
    if isinstance(values, dict):
        return list(values.items())
    keys, parts = [], []
    for key, value in map(items_of, items_of(values)):
        keys.append(key)
        parts.append(value)
    return list(zip(hashables(keys), parts, strict=True))


def _parts(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, PickledInstance):
        return [value.arguments, value.state]
    return value if isinstance(value, tuple | list | set | frozenset) else ()


def _check_bounded(value: object, count_max: int, path: str) -> None:
    """Raise UnsupportedFormatError if a value is nested too deep, contains itself, or contains more than `count_max`
    values.
    """
    done: dict[int, tuple[int, int]] = {}  # container, by id -> (number of values in it, its depth)
    above = set[int]()
    waiting = [(value, False)]
    while waiting:
        node, is_walked = waiting.pop()
        if id(node) in done:
            continue
        parts = _parts(node)
        if not is_walked:
            if not parts:
                continue
            above.add(id(node))
            inner = [part for part in parts if isinstance(part, _CONTAINERS)]
            if len(above) > _DEPTH_MAX or any(id(part) in above for part in inner):
                raise _unbounded_error(path)
            waiting.append((node, True))
            waiting += [(part, False) for part in inner]
            continue
        above.discard(id(node))
        inner_totals = [done[id(part)] for part in parts if id(part) in done]
        count = len(parts) + sum(inner for inner, _ in inner_totals)
        depth = 1 + max((inner for _, inner in inner_totals), default=0)
        if count > count_max or depth > _DEPTH_MAX:
            raise _unbounded_error(path)
        done[id(node)] = count, depth


_CONTAINERS = (dict, tuple, list, set, frozenset, PickledInstance)


def _unbounded_error(path: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"the values in {path} nest too deeply, contain themselves, or repeat too often",
        expected=f"at most {_DEPTH_MAX} levels",
        next="do not use this file; if you trust it, load it with torch and save only its tensors",
    )


class _Machine:
    def __init__(
        self, functions: KnownFunctions, records: frozenset[str], persistent: Callable[[object], object] | None,
        path: str
    ) -> None:
        self._known, self._records, self._persistent, self._path = functions, records, persistent, path
        self._stack: list[Any] = []
        self._memo: dict[int, object] = {}
        # for each container, how often each hash occurs among its keys that are not strings
        self._hashes = Counter[tuple[int, int]]()
        self._steps: dict[str, Callable[[Any], object]] = {
            "MARK": lambda _: self._stack.append(_StackMark()),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "EMPTY_SET": lambda _: self._stack.append(set()),
            "TUPLE": lambda _: self._stack.append(tuple(self._to_mark())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "LIST": lambda _: self._stack.append(self._to_mark()),
            "DICT": lambda _: self._dict(),
            "FROZENSET": lambda _: self._stack.append(frozenset(hashables(self._to_mark()))),
            "APPEND": lambda _: self._append([self.pop()]),
            "APPENDS": lambda _: self._append(self._to_mark()),
            "SETITEM": lambda _: self._set([self.pop(), self.pop()][::-1]),
            "SETITEMS": lambda _: self._set(self._to_mark()),
            "ADDITEMS": lambda _: self._add(self._to_mark()),
            "POP": lambda _: self.pop(),
            "POP_MARK": lambda _: self._to_mark(),
            "DUP": lambda _: self._stack.append(self._stack[-1]),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._stack[-1]),
            "GLOBAL": lambda text: self._global(text.replace(" ", ".")),
            "STACK_GLOBAL": lambda _: self._stack_global(),
            "REDUCE": lambda _: self._reduce(),
            "NEWOBJ": lambda _: self._reduce(),
            "NEWOBJ_EX": lambda _: self._reduce_named(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._stack.append(self._resolve(self.pop())),
        }

    def step(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self._stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._stack.append(self._memo[argument])
        elif name in self._steps:
            self._steps[name](argument)
        else:
            raise UnsupportedFormatError(
                f"{self._path} uses the opcode {name}, which no checkpoint needs", next="do not use this file"
            )

    def pop(self) -> Any:
        value = self._stack.pop()
        if isinstance(value, _StackMark):
            raise ValueError("there is a mark where a value should be")
        return value

    def _to_mark(self) -> list[Any]:
        values: list[Any] = []
        while not isinstance(value := self._stack.pop(), _StackMark):
            values.append(value)
        values.reverse()
        return values

    def _tuple(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def _append(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], Opaque):
            self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, Opaque):
            target.update(dict(zip(self._keys(target, values[::2]), values[1::2], strict=True)))

    def _add(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, Opaque):
            target.update(self._keys(target, values))

    def _dict(self) -> None:
        values = self._to_mark()
        self._stack.append({})
        self._set(values)

    def _keys(self, target: object, keys: Iterable[object]) -> list[object]:
        """Return the keys, if looking them up in `target` takes bounded time. Raises ValueError if not."""
        checked = list(map(hashable, keys))
        for key in checked:
            if not isinstance(key, str):
                same = id(target), hash(key)
                self._hashes[same] += 1
                if self._hashes[same] > SAME_HASH_MAX:
                    raise ValueError("thousands of keys of a dict have the same hash")
        return checked

    def _global(self, *parts: object) -> None:
        if not all(isinstance(part, str) and len(part) <= _NAME_CHARS_MAX and part.isprintable() for part in parts):
            raise ValueError("the name of a class or function is not valid")
        self._stack.append(Global(".".join(map(str, parts))))

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self._global(module, name)

    def _reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        self._stack.append(self._call(called, tuple(items_of(arguments))))

    def _reduce_named(self) -> None:
        named, arguments, called = self.pop(), self.pop(), self.pop()
        self._stack.append(self._call(called, (*items_of(arguments), *named.values())))

    def _call(self, called: object, arguments: tuple[object, ...]) -> object:
        if not isinstance(called, Global):
            return Opaque(called.name if isinstance(called, Opaque) else f"a call of a {type(called).__name__}")
        if called.name in ("copyreg._reconstructor", "copyreg.__newobj__") and isinstance(arguments[0], Global):
            return self._call(arguments[0], arguments[3:] if called.name.endswith("_reconstructor") else arguments[1:])
        if called.name in self._records:
            return PickledInstance(called.name, arguments)
        function = self._known.get(called.name)
        return Opaque(called.name) if function is None else function(*arguments)

    def _build(self) -> None:
        state, value = self.pop(), self._stack[-1]
        if isinstance(value, PickledInstance):
            value.fill(state)  # ignored for other values: attributes of containers, such as `_metadata`

    def _resolve(self, identity: object) -> object:
        if self._persistent is None:
            raise ValueError("the pickle refers to data that is not in the pickle")
        return self._persistent(identity)
