"""Checkpoints as a hostile writer would make them: each document of a real one is changed, with valid digests.

A reader may accept a mutant, or refuse it with one of our errors, in bounded time and memory. Nothing else is allowed.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import flowstone as fs
from flowstone.cli.ls import _listing
from flowstone.cli.show import _shown, _summary
from flowstone.format.digest import digest
from forge import edit_manifest, sealed_text, vouch_for


class Text(bytes):
    """Text for a document that need not be valid JSON."""


class Pairs(list):
    """A JSON object as pairs, so that a key can occur twice."""


HOSTILE: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 0.5,
    1e308, "", "a", "\0", "..", ".", "/etc/passwd", "../../x", "a/b", "x" * 70_000, "\x1b[2J", "[/]", "\u202e", "{}",
    [], {}, [[]], [0], [""], {"": 0}, {"a": {}}, [None] * 3, [-1, -1], ["x", "y"], [[0, 0], [0, 0]],
    {"$tensor": "nowhere"}, {"$tensor": 0}, {"$ndarray": "model.0.weight"}, {"$bytes": "!"}, {"$int": "0"},
    {"$float": "z"}, {"$int": "f" * 6000}, {"$dict": [[[], 1]]}, {"$set": [[0]]}, {"$text": "7f//"}, {"$text": "7aCA"},
    {"$named": "torch.dtype", "text": "evil"},
    {"$numpy": "datetime64[as]", "hex": "00" * 8}, {"$deque": [], "maxlen": 2**62}, {"$range": [0, 1, 0]}, {"$tag": 1},
    {"$provided": "generator", "parts": {}, "objects": {}}, {"$slice": [[], {}, None]}, {"$counter": [["a", "b"]]},
    Text(b"NaN"), Text(b"-Infinity"), Text(b"1e999"), Text(b'"\\ud800"'), Text(b'"\\udc00\\ud800"'), Text(b'"\xff"'),
    Text(b'"\xed\xa0\x80"'), Text(b"1" * 5000), Text(b"[" * 3000), Text(b"[" * 3000 + b"]" * 3000),
    Text(b'{"a":' * 500 + b"1" + b"}" * 500),
    Text(b""), Text(b"01"), Text(b"'a'"), Text(b'"'), Text(b"{}{}"), Text(b"\x00"),
)
"""The replacements that are tried for each value of a document."""


def state(value: float = 1.0, *, trained: bool = True) -> dict[str, object]:
    """The types of all values in a checkpoint's documents."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    if trained:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {
        "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "rng": fs.rng(), "generator": torch.Generator(), "philox": np.random.Generator(np.random.Philox(1)),
        "array": np.full((3, 2), value), "own": fs.PerRank({"seen": [1, 2]}),
        "many": [torch.full((2,), value), torch.full((), value, dtype=torch.bfloat16)],
        "plain": {
            "n": 3, "big": 2**70, "x": value, "nan": float("nan"), "text": "t", "lone": "\ud800", "bytes": b"b",
            "z": 1j, "tuple": (1, "2"), "set": {1, 2}, "deque": deque([1], 3), "ordered": OrderedDict(a=1),
            "counter": Counter("ab"), "keys": {1: 2, (3,): 4}, "range": range(3), "slice": slice(1, 2),
            "scalar": np.float32(1), "dtype": torch.float16, "none": None, "yes": True, "list": [0.5, -0.0],
            "day": np.datetime64("2020-01-01"),
        },
    }


# Documents


def parse(text: bytes) -> object:
    return json.loads(text, object_pairs_hook=Pairs)


def dump(node: object) -> bytes:
    """The text of a document, as JSON where that is possible."""
    if isinstance(node, Text):
        return bytes(node)
    if isinstance(node, Pairs):
        return b"{" + b",".join(json.dumps(key).encode() + b":" + dump(item) for key, item in node) + b"}"
    if isinstance(node, list):
        return b"[" + b",".join(map(dump, node)) + b"]"
    if isinstance(node, dict):
        return dump(Pairs(node.items()))
    return json.dumps(node).encode()


def places(node: object, above: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The path of each value of a document: positions from the outside in."""
    yield above
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from places(item[1] if isinstance(node, Pairs) else item, (*above, index))


def changed(node: object, place: tuple[int, ...], change: Callable[[list, int], None]) -> object:
    """A copy in which `change` was called with the container of the value at `place`, and its position there."""
    index, *below = place
    copy = type(node)(node)  # type: ignore[arg-type, call-arg]
    if not below:
        change(copy, index)
    elif isinstance(copy, Pairs):
        copy[index] = (copy[index][0], changed(copy[index][1], tuple(below), change))
    else:
        copy[index] = changed(copy[index], tuple(below), change)
    return copy


def _replace(value: object) -> Callable[[list, int], None]:
    def change(items: list, position: int) -> None:
        items[position] = (items[position][0], value) if isinstance(items, Pairs) else value

    return change


def _drop(items: list, position: int) -> None:
    del items[position]


def _double(items: list, position: int) -> None:
    items.append(items[position])


def _rename(items: list, position: int) -> None:
    items[position] = ("\0../$x", items[position][1]) if isinstance(items, Pairs) else {"$x": items[position]}


def _conflict(items: list, position: int) -> None:
    items.append((items[position][0], None) if isinstance(items, Pairs) else None)


STRUCTURAL = (*map(_replace, HOSTILE), _drop, _double, _rename, _conflict)


def mutants_of(text: bytes) -> list[Callable[[], bytes]]:
    """Every change of a single value of a document, as functions that make the changed text."""
    whole = parse(text)
    found: list[Callable[[], bytes]] = [lambda value=value: dump(value) for value in HOSTILE]  # type: ignore[misc]
    for place in places(whole):
        if place:
            found += [lambda place=place, change=change: dump(changed(whole, place, change)) for change in STRUCTURAL]  # type: ignore[misc]
    return found


def spliced(data: bytes, rng: random.Random) -> bytes:
    """The bytes truncated, extended, or with bytes changed, removed, inserted or moved."""
    begin, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64))
    some = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size, b'"', b"[" * size, b"{},", b"9" * size, b"-"))
    other = rng.randrange(len(data) + 1)
    return rng.choice((
        data[:begin], data + some, data[:begin] + some + data[begin:], data[:begin] + some + data[begin + len(some) :],
        data[:begin] + data[begin + size :], data[:begin] + data[other : other + size] + data[begin:],
    ))


# Replacing a document


def put(checkpoint: Path, document: str, text: bytes) -> None:
    """Replace the text of a checkpoint's document, with valid digests."""
    if document in ("flowstone.json", "manifest.json"):
        path = checkpoint.parent / document if document == "flowstone.json" else checkpoint / document
        path.write_bytes(sealed_text(text))
    elif document in ("objects", "index"):
        vouch_for(checkpoint, document, text)
    elif document == "index header":
        old = (checkpoint / "index.safetensors").read_bytes()
        body = old[8 + int.from_bytes(old[:8], "little") :]
        vouch_for(checkpoint, "index", len(text).to_bytes(8, "little") + text + body)
    else:
        path = checkpoint / "rank-00000.safetensors"
        old = path.read_bytes()
        body = old[8 + int.from_bytes(old[:8], "little") :]
        text = text.ljust(len(old) - len(body) - 8)
        header = len(text).to_bytes(8, "little") + text
        path.write_bytes(header + body)
        row = {"header_bytes": len(header), "header_digest": digest(header), "bytes": len(header + body)}
        edit_manifest(checkpoint, lambda m: m["segments"][0].update(row))


def text_of(checkpoint: Path, document: str) -> bytes:
    if document in ("flowstone.json", "manifest.json"):
        path = checkpoint.parent / document if document == "flowstone.json" else checkpoint / document
        fields = json.loads(path.read_bytes())
        del fields["digest"]
        return json.dumps(fields).encode()
    if document == "objects":
        return (checkpoint / "objects.json").read_bytes()
    name = "rank-00000.safetensors" if document == "segment header" else "index.safetensors"
    data = (checkpoint / name).read_bytes()
    return data if document == "index" else data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip()


DOCUMENTS = ("flowstone.json", "manifest.json", "objects", "index header", "segment header")


# Operations on a mutant


def attempts(checkpoint: Path) -> dict[str, Callable[[], object]]:
    """The operations of a user on a checkpoint, each tried by itself."""
    store = checkpoint.parent

    def load() -> None:
        with fs.Checkpointer(store) as checkpointer:
            checkpointer.load(state(9.0, trained=False))

    def read() -> None:
        opened = fs.open(store)
        opened.read(next(iter(opened.tensors)))

    def show() -> None:
        opened = fs.open(store)
        _ = opened.tensors, opened.contents
        json.dumps(_shown(opened))
        for value in opened.objects.values():
            _summary(value)

    return {
        "check": lambda: fs.open(store).check(), "inspect": lambda: fs.open(checkpoint).inspect(), "read": read,
        "show": show, "ls": lambda: _listing(store), "load": load,
    }


def trouble_with(checkpoint: Path) -> list[str]:
    """A result that is neither an answer nor one of our errors."""
    collected = []
    for key, act in attempts(checkpoint).items():
        try:
            act()
        except fs.FlowstoneError as error:
            if len(str(error)) > 20_000 and key != "load":  # its messages spell out names
                collected.append(f"{key}: an error of {len(str(error))} characters")
        except Exception as error:
            collected.append(f"{key}: {type(error).__name__}: {error!s:.200}")
    return collected


def fresh_copy(pristine: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(pristine, target)
    return next(target.glob("step-*"))
