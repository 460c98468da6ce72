"""An interpreter for a small part of PTX. It translates a kernel, instruction by instruction, into a Python generator.

Each thread is a generator; warps run one after the other. The threads of a warp run one by one until each reaches a
shuffle or its end; at a shuffle they exchange values. Unknown instructions are refused. So it shows what the text
computes, but not whether a driver accepts it. https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, Protocol

WARP = 32
_BITS = {"b32": 32, "u32": 32, "b64": 64, "u64": 64, "u16": 16, "u8": 8}
_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
_CONSTANTS = 0x7C00_0000_0000
_COMPUTED: Mapping[str, str] = {
    "add": "{} + {}", "sub": "{} - {}", "or": "{} | {}", "and": "{} & {}", "xor": "{} ^ {}", "shl": "{} << {}",
    "shr": "{} >> {}", "mul.lo": "{} * {}", "mul.hi": "{} * {} >> 64", "div": "{} // {}",
}
_COMPARED: Mapping[str, str] = {"ge": ">=", "ne": "!=", "lt": "<", "eq": "=="}
_SPECIAL: Mapping[str, str] = {
    "%ctaid.x": "block", "%nctaid.x": "blocks", "%tid.x": "thread", "%ntid.x": "threads",
}


class Shuffle(NamedTuple):
    """A thread's value at a shuffle. It gets that of the thread whose number differs from its own in these bits."""

    step: int
    value: int
    bits: int


class Memory(Protocol):
    """The memory that a kernel can access. Each address must be a multiple of the access's length."""

    def load(self, address: int, length: int) -> bytes: ...
    def store(self, address: int, value: bytes) -> None: ...


class Parameter(NamedTuple):
    name: str
    kind: str


Thread = Callable[..., Generator[Shuffle, int, None]]


class Kernel:
    """An entry of a module's text."""

    def __init__(self, text: str, entry: str) -> None:
        self.parameters, self._thread = _translated(text, entry)

    def launch(self, blocks: int, threads: int, arguments: Sequence[int], memory: Memory) -> None:
        assert len(arguments) == len(self.parameters)
        known = {parameter.name: value for parameter, value in zip(self.parameters, arguments, strict=True)}
        for block, first in product(range(blocks), range(0, threads, WARP)):
            numbers = range(first, min(first + WARP, threads))
            _play([self._thread(block, blocks, n, threads, known, memory.load, memory.store) for n in numbers])


def _play(threads: Sequence[Generator[Shuffle, int, None]]) -> None:
    """One warp. All its threads reach the same shuffles."""
    given = [next(thread, None) for thread in threads]
    while any(given):
        came = [item for item in given if item is not None]
        assert len(came) == WARP, "threads of a warp are missing at a shuffle"
        assert len({(item.step, item.bits) for item in came}) == 1, "threads of a warp are at different shuffles"
        got = [came[index ^ item.bits].value for index, item in enumerate(came)]
        given = []
        for thread, value in zip(threads, got, strict=True):
            try:
                given.append(thread.send(value))
            except StopIteration:
                given.append(None)


@functools.cache
def _translated(text: str, entry: str) -> tuple[list[Parameter], Thread]:
    source = _Source(text, entry)
    names: dict[str, object] = {"Shuffle": Shuffle, "constants": source.constants}
    exec(compile("\n".join(source.lines()), f"<{entry}>", "exec"), names)
    return source.parameters, names["played"]  # type: ignore[return-value]


class _Source:
    """A kernel's text, and its translation to Python."""

    def __init__(self, text: str, entry: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        limit = r"(?:\.maxntid [\d, ]+)?"  # of the number of threads
        head = re.search(rf"\.visible \.entry {entry}\(([^)]*)\)\s*{limit}\s*\{{(.*?)\n\}}", text, re.DOTALL)
        assert head is not None, f"no entry {entry}"
        self.parameters = [Parameter(name, kind) for kind, name in re.findall(r"\.param \.(\w+) (\w+)", head[1])]
        match = re.search(r"\.const \.align 8 \.u64 (\w+)\[(\d+)\] = \{([^}]*)\}", text)
        self.constants = [] if match is None else [int(word, 0) for word in match[3].split(",")]
        assert match is None or len(self.constants) == int(match[2])
        self.places = {} if match is None else {match[1]: _CONSTANTS}
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
                match = re.fullmatch(r"(?:@(!?\w+)\s+)?(\S+)\s*(.*)", line, re.DOTALL)
                assert match is not None, line
                self.steps.append((match[1], match[2], re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", match[3])))

    def lines(self) -> Iterator[str]:
        """The body of a function. The code after a label is reached by the label's number, or from above."""
        yield "def played(block, blocks, thread, threads, parameters, load, store):"
        yield "    at = 0"
        yield "    while True:"
        yield "        if at == 0:"
        labels = list(self.labels)
        for number, (guard, name, given) in enumerate(self.steps):
            for label in [label for label in labels if self.labels[label] == number]:
                yield f"            at = {labels.index(label) + 1}"
                yield f"        if at == {labels.index(label) + 1}:"
            indent = " " * 12
            if guard is not None:
                yield f"{indent}if {'not ' * guard.startswith('!')}{self._value(guard.lstrip('!'))}:"
                indent += " " * 4
            yield from (indent + line for line in self._statements(number, name, given))
        yield "    yield"  # never reached: makes a kernel without shuffles a generator, too

    def _statements(self, number: int, name: str, given: Sequence[str]) -> Iterator[str]:
        if name == "ret":
            yield "return"
        elif name == "bra":
            yield f"at = {list(self.labels).index(given[0]) + 1}"
            yield "continue"
        elif name == "shfl.sync.bfly.b32":
            assert (int(given[3], 0), int(given[4], 0)) == (31, 0xFFFFFFFF), "not of a whole warp"
            got = f"(yield Shuffle({number}, {self._value(given[1])}, {self._value(given[2])}))"
            yield self._put(given[0], "b32", got)
        elif name.startswith(("ld.", "st.")):
            yield from self._move(name, given)
        else:
            yield from self._compute(name, given)

    def _value(self, text: str) -> str:
        """An operand: a register, a special register, the address of a constant, or a number."""
        if text in self.registers:
            return f"own_{text}"
        return _SPECIAL.get(text) or str(self.places[text] if text in self.places else int(text, 0))

    def _joined(self, text: str) -> str:
        """A value, or two of 32 bits, the lower one first."""
        if not text.startswith("{"):
            return self._value(text)
        low, high = re.findall(r"\w+", text)
        return f"({self._value(low)} | {self._value(high)} << 32)"

    def _put(self, name: str, kind: str, value: str) -> str:
        own = self.registers[name]
        assert kind == "pred" or kind[1:] == own[1:] or (kind == "u8" and own == "u16"), f"{name} is .{own}"
        return f"own_{name} = {value}" if kind == "pred" else f"own_{name} = ({value}) & {(1 << _BITS[kind]) - 1}"

    def _move(self, name: str, given: Sequence[str]) -> Iterator[str]:
        """A load or a store."""
        verb, place, *vector, kind = name.split(".")
        target = given[0] if verb == "st" else given[1]
        base, _, offset = target.strip("[]").partition("+")
        parts = re.findall(r"\w+", given[1] if verb == "st" else given[0])
        size, bits = _BYTES[kind], (1 << _BITS[kind]) - 1
        assert len(parts) == (int(vector[0][1:]) if vector else 1)
        if place == "param":
            yield self._put(given[0], kind, f"parameters[{base!r}]")
            return
        address = f"{self._value(base)} + {int(offset or '0')}"
        if place == "const":
            yield self._put(given[0], kind, f"constants[({address} - {_CONSTANTS}) // 8]")
        elif verb == "st":
            words = [f"({self._value(part)} & {bits}).to_bytes({size}, 'little')" for part in parts]
            yield f"store({address}, {' + '.join(words)})"
        else:
            yield f"found = load({address}, {size * len(parts)})"
            for index, register in enumerate(parts):
                part = f"found[{size * index}:{size * (index + 1)}]"
                yield self._put(register, kind, f"int.from_bytes({part}, 'little')")

    def _compute(self, name: str, given: Sequence[str]) -> Iterator[str]:
        verb, *kinds = name.split(".")
        kind = kinds[-1]
        values = [self._joined(item) for item in given[1:] if self.registers.get(item) != "pred"]
        target = given[0]
        if target.startswith("{"):
            assert name == "mov.b64"
            low, high = re.findall(r"\w+", target)
            yield f"both = {values[0]}"
            yield self._put(low, "b32", "both")
            yield self._put(high, "b32", "both >> 32")
        elif verb == "mov":
            yield self._put(target, kind, values[0])
        elif verb == "setp":
            yield self._put(target, "pred", f"{values[0]} {_COMPARED[kinds[0]]} {values[1]}")
        elif verb == "selp":
            yield self._put(target, kind, f"{values[0]} if {self._value(given[3])} else {values[1]}")
        elif name in ("cvt.u64.u32", "cvt.u32.u64", "cvt.u64.u16"):
            yield self._put(target, kinds[0], values[0])
        elif name in ("mad.wide.u32", "mad.lo.u32", "mad.lo.u64"):
            wide = "u64" if kinds[0] == "wide" else kind
            yield self._put(target, wide, f"{values[0]} * {values[1]} + {values[2]}")
        elif name.removesuffix(f".{kind}") in _COMPUTED:
            yield self._put(target, kind, _COMPUTED[name.removesuffix(f".{kind}")].format(*values))
        else:
            raise AssertionError(f"an instruction that is not known: {name}")
