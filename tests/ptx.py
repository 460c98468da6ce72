"""An interpreter of a small part of PTX, for one kernel: registers by name, warp after warp.

The threads of a warp go one after the other until each has come to a shuffle, or to the end; there they exchange. It
refuses what it does not know; so it says what the text does, not whether a driver takes it.
https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, Protocol

WARP = 32
_BITS = {"b32": 32, "u32": 32, "b64": 64, "u64": 64, "u16": 16, "u8": 8}
_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
_CONSTANTS = 0x7C00_0000_0000
_COMPUTED: Mapping[str, Callable[[int, int], int]] = {
    "add": int.__add__, "sub": int.__sub__, "or": int.__or__, "and": int.__and__, "xor": int.__xor__,
    "shl": int.__lshift__, "shr": int.__rshift__, "mul.lo": int.__mul__, "mul.hi": lambda a, b: a * b >> 64,
    "div": int.__floordiv__,
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "ge": int.__ge__, "ne": int.__ne__, "lt": int.__lt__, "eq": int.__eq__,
}


class Shuffle(NamedTuple):
    """What a thread gives at a shuffle: it gets what the thread has whose number differs from its own by these bits."""

    step: int
    value: int
    bits: int


class Memory(Protocol):
    """What a kernel reaches. Each access lies at a multiple of its length."""

    def load(self, address: int, length: int) -> bytes: ...
    def store(self, address: int, value: bytes) -> None: ...


class Parameter(NamedTuple):
    name: str
    kind: str


class Kernel:
    """An entry of a module's text."""

    def __init__(self, text: str, entry: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        limit = r"(?:\.maxntid [\d, ]+)?"  # of threads
        head = re.search(rf"\.visible \.entry {entry}\(([^)]*)\)\s*{limit}\s*\{{(.*?)\n\}}", text, re.DOTALL)
        assert head is not None, f"no entry {entry}"
        self.parameters = [Parameter(name, kind) for kind, name in re.findall(r"\.param \.(\w+) (\w+)", head[1])]
        found = re.search(r"\.const \.align 8 \.u64 (\w+)\[(\d+)\] = \{([^}]*)\}", text)
        self.constants = [] if found is None else [int(one, 0) for one in found[3].split(",")]
        assert found is None or len(self.constants) == int(found[2])
        self.places = {} if found is None else {found[1]: _CONSTANTS}
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.steps: list[tuple[str | None, str, list[str]]] = []
        body = re.sub(r"(\w+):", r"\1:;", head[2])
        for line in filter(None, map(str.strip, body.split(";"))):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.steps)
            elif line.startswith(".reg"):
                _, kind, names = line.split(None, 2)
                self.registers |= dict.fromkeys(re.split(r",\s*", names), kind[1:])
            else:
                found = re.fullmatch(r"(?:@(!?\w+)\s+)?(\S+)\s*(.*)", line, re.DOTALL)
                assert found is not None, line
                self.steps.append((found[1], found[2], re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", found[3])))

    def launch(self, blocks: int, threads: int, arguments: Sequence[int], memory: Memory) -> None:
        assert len(arguments) == len(self.parameters)
        known = {one.name: value for one, value in zip(self.parameters, arguments, strict=True)}
        for block, first in product(range(blocks), range(0, threads, WARP)):
            numbers = range(first, min(first + WARP, threads))
            special = [{"%ctaid.x": block, "%nctaid.x": blocks, "%tid.x": at, "%ntid.x": threads} for at in numbers]
            _play([_Thread(self, one, known, memory).run() for one in special])


def _play(threads: Sequence[Generator[Shuffle, int, None]]) -> None:
    """One warp. Each of its threads comes to the same shuffles."""
    given = [next(thread, None) for thread in threads]
    while any(given):
        came = [one for one in given if one is not None]
        assert len(came) == WARP, "threads of a warp are missing at a shuffle"
        assert len({(one.step, one.bits) for one in came}) == 1, "threads of a warp are at different shuffles"
        got = [came[at ^ one.bits].value for at, one in enumerate(came)]
        given = []
        for thread, value in zip(threads, got, strict=True):
            try:
                given.append(thread.send(value))
            except StopIteration:
                given.append(None)


class _Thread:
    """One thread: what it holds."""

    def __init__(
        self, kernel: Kernel, special: Mapping[str, int], parameters: Mapping[str, int], memory: Memory
    ) -> None:
        self._kernel, self._memory, self._parameters = kernel, memory, parameters
        self._known = {**kernel.places, **special}
        self._held: dict[str, int] = {}

    def run(self) -> Generator[Shuffle, int, None]:
        at, steps = 0, self._kernel.steps
        while True:
            guard, name, given = steps[at]
            at += 1
            if guard is not None and bool(self._held[guard.lstrip("!")]) == guard.startswith("!"):
                continue
            if name == "ret":
                return
            if name == "bra":
                at = self._kernel.labels[given[0]]
            elif name == "shfl.sync.bfly.b32":
                assert (self._value(given[3]), self._value(given[4])) == (31, 0xFFFFFFFF), "not of a whole warp"
                got = yield Shuffle(at, self._value(given[1]), self._value(given[2]))
                self._put(given[0], "b32", got)
            elif name.startswith(("ld.", "st.")):
                self._move(name, given)
            else:
                self._compute(name, given)

    def _value(self, text: str) -> int:
        if text in self._known:
            return self._known[text]
        return self._held[text] if text in self._kernel.registers else int(text, 0)

    def _joined(self, text: str) -> int:
        """A value, or two of 32 bits: the lower one first."""
        if not text.startswith("{"):
            return self._value(text)
        low, high = re.findall(r"\w+", text)
        return self._value(low) | self._value(high) << 32

    def _put(self, name: str, kind: str, number: int) -> None:
        own = self._kernel.registers[name]
        assert kind == "pred" or kind[1:] == own[1:] or (kind == "u8" and own == "u16"), f"{name} is .{own}"
        self._held[name] = number if kind == "pred" else number & ((1 << _BITS[kind]) - 1)

    def _move(self, name: str, given: Sequence[str]) -> None:
        """A load or a store."""
        verb, place, *vector, kind = name.split(".")
        target = given[0] if verb == "st" else given[1]
        base, _, offset = target.strip("[]").partition("+")
        parts = re.findall(r"\w+", given[1] if verb == "st" else given[0])
        size, bits = _BYTES[kind], (1 << _BITS[kind]) - 1
        assert len(parts) == (int(vector[0][1:]) if vector else 1)
        if place == "param":
            self._put(given[0], kind, self._parameters[base])
            return
        address = self._value(base) + int(offset or "0")
        if place == "const":
            self._put(given[0], kind, self._kernel.constants[(address - _CONSTANTS) // 8])
        elif verb == "st":
            words = [(self._held[one] & bits).to_bytes(size, "little") for one in parts]
            self._memory.store(address, b"".join(words))
        else:
            found = self._memory.load(address, size * len(parts))
            for at, register in enumerate(parts):
                self._put(register, kind, int.from_bytes(found[size * at : size * (at + 1)], "little"))

    def _compute(self, name: str, given: Sequence[str]) -> None:
        verb, *kinds = name.split(".")
        kind = kinds[-1]
        values = [self._joined(one) for one in given[1:] if self._kernel.registers.get(one) != "pred"]
        target = given[0]
        if target.startswith("{"):
            assert name == "mov.b64"
            low, high = re.findall(r"\w+", target)
            self._put(low, "b32", values[0])
            self._put(high, "b32", values[0] >> 32)
        elif verb == "mov":
            self._put(target, kind, values[0])
        elif verb == "setp":
            self._put(target, "pred", int(_COMPARED[kinds[0]](*values)))
        elif verb == "selp":
            self._put(target, kind, values[0] if self._held[given[3]] else values[1])
        elif name in ("cvt.u64.u32", "cvt.u32.u64", "cvt.u64.u16"):
            self._put(target, kinds[0], values[0])
        elif name in ("mad.wide.u32", "mad.lo.u32", "mad.lo.u64"):
            self._put(target, "u64" if kinds[0] == "wide" else kind, values[0] * values[1] + values[2])
        elif name.removesuffix(f".{kind}") in _COMPUTED:
            self._put(target, kind, _COMPUTED[name.removesuffix(f".{kind}")](*values))
        else:
            raise AssertionError(f"an instruction that is not known: {name}")
