"""An interpreter of a small part of PTX, for one kernel: registers by name, one thread after the other.

It refuses what it does not know; so it says what the text does, not whether a driver takes it.
https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

_BITS = {"b32": 32, "u32": 32, "b64": 64, "u64": 64, "u16": 16, "u8": 8}
_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
_COMPUTED: Mapping[str, Callable[[int, int], int]] = {
    "add": int.__add__, "or": int.__or__, "and": int.__and__, "shl": int.__lshift__,
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {"ge": int.__ge__, "ne": int.__ne__, "lt": int.__lt__}


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
        head = re.search(rf"\.visible \.entry {entry}\(([^)]*)\)\s*\{{(.*?)\n\}}", text, re.DOTALL)
        assert head is not None, f"no entry {entry}"
        self.parameters = [Parameter(name, kind) for kind, name in re.findall(r"\.param \.(\w+) (\w+)", head[1])]
        self._registers: dict[str, str] = {}
        self._labels: dict[str, int] = {}
        self._steps: list[tuple[str | None, str, list[str]]] = []
        body = re.sub(r"(\w+):", r"\1:;", head[2])
        for line in filter(None, map(str.strip, body.split(";"))):
            if line.endswith(":"):
                self._labels[line[:-1]] = len(self._steps)
            elif line.startswith(".reg"):
                _, kind, names = line.split(None, 2)
                self._registers |= dict.fromkeys(re.split(r",\s*", names), kind[1:])
            else:
                found = re.fullmatch(r"(?:@(\w+)\s+)?(\S+)\s*(.*)", line, re.DOTALL)
                assert found is not None, line
                self._steps.append((found[1], found[2], re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", found[3])))

    def launch(self, blocks: int, threads: int, arguments: Sequence[int], memory: Memory) -> None:
        assert len(arguments) == len(self.parameters)
        known = {one.name: value for one, value in zip(self.parameters, arguments, strict=True)}
        for block in range(blocks):
            for thread in range(threads):
                special = {"%ctaid.x": block, "%nctaid.x": blocks, "%tid.x": thread, "%ntid.x": threads}
                self._run(special, known, memory)

    def _run(self, special: Mapping[str, int], parameters: Mapping[str, int], memory: Memory) -> None:
        held: dict[str, int] = {}

        def value(text: str) -> int:
            if text in special:
                return special[text]
            return held[text] if text in self._registers else int(text, 0)

        def reached(text: str) -> int:
            base, _, offset = text.strip("[]").partition("+")
            return value(base) + int(offset or "0")

        def put(name: str, kind: str, number: int) -> None:
            own = self._registers[name]
            assert kind == "pred" or kind[1:] == own[1:] or (kind == "u8" and own == "u16"), f"{name} is .{own}"
            held[name] = number if kind == "pred" else number & ((1 << _BITS[kind]) - 1)

        at = 0
        while True:
            guard, name, given = self._steps[at]
            at += 1
            if guard is not None and not held[guard]:
                continue
            verb, *kinds = name.split(".")
            kind = kinds[-1] if kinds else ""
            if name == "ret":
                return
            if name == "bra":
                at = self._labels[given[0]]
            elif name in ("ld.param.u64", "ld.param.u32"):
                put(given[0], kind, parameters[given[1].strip("[]")])
            elif verb == "mov":
                put(given[0], kind, value(given[1]))
            elif verb == "setp":
                put(given[0], "pred", int(_COMPARED[kinds[0]](value(given[1]), value(given[2]))))
            elif verb == "selp":
                put(given[0], kind, value(given[1]) if held[given[3]] else value(given[2]))
            elif name == "cvt.u64.u32":
                put(given[0], "u64", value(given[1]))
            elif name == "mad.wide.u32":
                put(given[0], "u64", value(given[1]) * value(given[2]) + value(given[3]))
            elif name == "mad.lo.u32":
                put(given[0], "u32", value(given[1]) * value(given[2]) + value(given[3]))
            elif verb in ("add", "or", "and", "shl"):
                put(given[0], kind, _COMPUTED[verb](value(given[1]), value(given[2])))
            elif name == "ld.global.v4.u32":
                found = memory.load(reached(given[1]), 16)
                for part, register in enumerate(re.findall(r"\w+", given[0])):
                    put(register, "u32", int.from_bytes(found[4 * part : 4 * part + 4], "little"))
            elif name == "st.global.v4.u32":
                words = [held[register].to_bytes(4, "little") for register in re.findall(r"\w+", given[1])]
                memory.store(reached(given[0]), b"".join(words))
            elif name in ("ld.global.u64", "ld.global.u32", "ld.global.u8"):
                put(given[0], kind, int.from_bytes(memory.load(reached(given[1]), _BYTES[kind]), "little"))
            elif name == "st.global.u8":
                memory.store(reached(given[0]), bytes([held[given[1]] & 0xFF]))
            else:
                raise AssertionError(f"an instruction that is not known: {name}")
