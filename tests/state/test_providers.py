"""Providers: their promises are checked, with errors that name provider and path, before any write or change."""

from __future__ import annotations

import array
import gc
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from reference import Checkpoint, load, save, stored

import flowstone as fs
from flowstone.errors import CollisionError, ProviderError, UnsupportedStateError
from flowstone.format.objects import ProviderRecord, TensorRef
from flowstone.state import describe, prepare
from flowstone.table.box import Box


class Thing:
    """Somebody's object."""

    def __init__(self, fill: float = 0.0, rows: int = 3) -> None:
        self.fixed = torch.full((2, 2), fill)
        self.table = np.full((rows, 2), fill)
        self.note: object = {"fill": fill}
        self.size = 7


class Derived(Thing):
    pass


class Good(fs.Provider[Thing]):
    kind = "thing"

    def describe(self, value: Thing) -> Sequence[fs.Part | fs.ObjectPart]:
        return [
            fs.Part.of("fixed", value.fixed, lazy=True), fs.Part.of("inner.table", value.table, resizable=True),
            fs.ObjectPart("note"), fs.ObjectPart("size", constant=True),
        ]

    def chunks(self, value: Thing) -> Iterable[object]:
        yield value.fixed
        yield value.table
        yield value.note
        yield value.size

    def restore(self, value: Thing, stored: Mapping[str, Any]) -> None:
        assert set(stored) == {"inner.table", "note"}
        value.table, value.note = stored["inner.table"], stored["note"]


class Says(fs.Provider[Any]):
    """Says what a test lets it say."""

    def __init__(self, parts: object, chunks: object = (), restore: Callable[..., None] | None = None) -> None:
        self._parts, self._chunks, self._restore = parts, chunks, restore

    def describe(self, value: object) -> Any:
        return self._parts() if callable(self._parts) else self._parts

    def chunks(self, value: object) -> Any:
        return self._chunks() if callable(self._chunks) else self._chunks

    def restore(self, value: object, stored: Mapping[str, object]) -> None:
        if self._restore is not None:
            self._restore(value, stored)


def describe_all(state: Mapping[str, object]) -> None:
    """All of a description, objects included."""
    _ = describe(state).objects


def refused(provider: fs.Provider[Any], value: object | None = None) -> str:
    """What is said of a provider when a state with an object of its is saved."""
    with fs.register_provider(Thing, provider), pytest.raises(ProviderError, match=r"'s\.deep\.0'") as caught:
        describe_all({"s": {"deep": [value or Thing()]}})
    text = str(caught.value)
    assert "\n  provider    test_providers." in text
    assert "\n  next" in text
    return text


def test_an_object_comes_back_as_it_was() -> None:
    source, target = Thing(5.0, rows=4), Thing(1.0)
    held = target.fixed.data_ptr()
    with fs.register_provider(Thing, Good()):
        checkpoint = save({"s": [source, 1]})
        load(checkpoint, {"s": [target, 0]})
    assert set(checkpoint.tensors) == {"s.0.fixed", "s.0.inner.table"}
    assert target.fixed.data_ptr() == held
    assert torch.equal(target.fixed, source.fixed)
    assert np.array_equal(target.table, source.table)
    assert target.table is not source.table
    assert target.note == {"fill": 5.0}


def test_what_is_lazy_is_what_the_provider_says() -> None:
    with fs.register_provider(Thing, Good()):
        assert describe({"s": Thing()}).lazy == (True, False)


def test_the_most_derived_type_wins() -> None:
    class Other(Good):
        kind = "other"

    with fs.register_provider(Thing, Good()):
        assert describe({"s": Derived()}).objects["s"].kind == "thing"  # type: ignore[attr-defined]
        with fs.register_provider(Derived, Other()):
            assert describe({"s": Derived()}).objects["s"].kind == "other"  # type: ignore[attr-defined]
            assert describe({"s": Thing()}).objects["s"].kind == "thing"  # type: ignore[attr-defined]
        assert describe({"s": Derived()}).objects["s"].kind == "thing"  # type: ignore[attr-defined]


def test_a_provider_takes_the_word_from_a_built_in_kind() -> None:
    class Loader(Thing):
        def state_dict(self) -> dict[str, object]:
            raise AssertionError("the provider has the word")

        load_state_dict = state_dict

    with fs.register_provider(Loader, Good()):
        load(save({"s": Loader(2.0)}), {"s": (target := Loader())})
    assert target.note == {"fill": 2.0}


def test_a_decorator_registers_a_class_of_providers() -> None:
    class Mine(Thing):
        pass

    @fs.register_provider(Mine)
    class Provides(Good):
        kind = None

    actual = describe({"s": Mine()}).objects["s"]
    assert isinstance(actual, ProviderRecord)
    assert actual.kind.endswith("test_a_decorator_registers_a_class_of_providers.<locals>.Mine")
    assert issubclass(Provides, fs.Provider)


def test_a_registration_ends() -> None:
    registration = fs.register_provider(Thing, Good())
    assert registration.kind == "thing"
    registration.remove()
    registration.remove()
    with pytest.raises(UnsupportedStateError, match="'s'"):
        describe_all({"s": Thing()})
    fs.register_provider(Thing, Good()).remove()


class Incomplete(fs.Provider[Thing]):
    def describe(self, value: Thing) -> Sequence[fs.Part]:
        return []


def test_what_cannot_be_a_provider_fails_at_registration() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Incomplete()  # type: ignore[abstract]
    for own, provider, why in [
        (Thing, object(), "cannot be the provider"), (Thing, Good, "cannot be the provider"),
        (Thing(), Good(), "not a type"), (dict, Good(), "built-in"), (torch.Tensor, Good(), "built-in"),
        (torch.nn.Module, Good(), "built-in"), (np.random.Generator, Good(), "built-in"),
        (random.Random, Good(), "built-in"), (object, Good(), "built-in"),
    ]:
        with pytest.raises(ProviderError, match=why):
            fs.register_provider(own, provider)  # type: ignore[arg-type]
    for kind in ("", "a\0b", 3, "\ud800"):
        provider = Good()
        provider.kind = kind  # type: ignore[assignment]
        with pytest.raises(ProviderError, match="kind"):
            fs.register_provider(Thing, provider)


def test_a_type_and_a_kind_have_one_provider() -> None:
    with fs.register_provider(Thing, Good()):
        for own in (Thing, Derived):
            with pytest.raises(ProviderError, match="second provider") as caught:
                fs.register_provider(own, Good())
            assert "test_providers.Thing as 'thing'" in str(caught.value)


ONES = torch.ones(2)
PART = fs.Part("a", "float32", (2,))

WRONG: dict[str, tuple[Any, Any, str]] = {
    "no parts": (None, (), "describe\\(\\) raised TypeError"),
    "something else": (["a"], (), "describes something that is not a part"),
    "an empty name": ([fs.Part("", "float32", (2,))], [ONES], "a part named ''"),
    "an empty component": ([fs.Part("a..b", "float32", (2,))], [ONES], "a part named 'a..b'"),
    "a name that no index holds": ([fs.Part("a\0", "float32", (2,))], [ONES], "a part named 'a"),
    "a name that is no text": ([fs.ObjectPart(3)], [1], "a part named 3"),  # type: ignore[arg-type]
    "a name twice": ([PART, PART], [ONES, ONES], "boxes of 'a' that overlap"),
    "an object of a tensor's name": ([PART, fs.ObjectPart("a")], [ONES, 1], "two parts the name 'a'"),
    "objects of one name": ([fs.ObjectPart("a"), fs.ObjectPart("a")], [1, 1], "two parts the name 'a'"),
    "objects first": ([fs.ObjectPart("b"), PART], [1, ONES], "'a' after an object"),
    "no dtype": ([fs.Part("a", "float33", (2,))], [ONES], "wrongly"),
    "no shape": ([fs.Part("a", "float32", (-2,))], [ONES], "wrongly"),
    "a list for a shape": ([fs.Part("a", "float32", [2])], [ONES], "wrongly"),  # type: ignore[arg-type]
    "a box outside": ([fs.Part("a", "float32", (2,), Box((1,), (2,)))], [ONES], "wrongly"),
    "boxes that overlap": (
        [fs.Part("a", "float32", (3,), Box((0,), (2,))), fs.Part("a", "float32", (3,), Box((1,), (2,)))], [ONES, ONES],
        r"\[0:2\] and \[1:3\]",
    ),
    "boxes that overlap, others between them": (
        [fs.Part("a", "float32", (4, 9), Box(position, (2, 2))) for position in ((0, 0), (0, 5), (1, 1), (2, 7))],
        [torch.ones(2, 2)] * 4, r"\[0:2,0:2\] and \[1:3,1:3\]",
    ),
    "an empty tensor twice": ([fs.Part("a", "float32", (0,))] * 2, [torch.ones(0)] * 2, "boxes of 'a' that overlap"),
    "a number twice": ([fs.Part("a", "float32", ())] * 2, [torch.ones(())] * 2, "boxes of 'a' that overlap"),
    "boxes of two shapes": (
        [fs.Part("a", "float32", (4,), Box((0,), (2,))), fs.Part("a", "float32", (5,), Box((2,), (2,)))], [ONES, ONES],
        "boxes of 'a' that differ",
    ),
    "too few chunks": ([PART, fs.Part("b", "float32", (2,))], [ONES], "too few chunks"),
    "no object": ([PART, fs.ObjectPart("b")], [ONES], "too few chunks"),
    "too many chunks": ([PART], [ONES, ONES], "too many chunks"),
    "too many objects": ([PART, fs.ObjectPart("b")], [ONES, 1, 2], "too many chunks"),
    "chunks that are none": ([PART], 3, "chunks\\(\\) raised TypeError"),
    "another shape": ([PART], [torch.ones(3)], r"float32 \(3,\)"),
    "another dtype": ([PART], [torch.ones(2, dtype=torch.int32)], r"int32 \(2,\)"),
    "an array too long": ([PART], [np.ones(3, np.float32)], r"float32 \(3,\)"),
    "a buffer too long": ([PART], [bytes(9)], "9 bytes"),
    "a buffer too short": ([PART], [bytes(7)], "7 bytes"),
    "a buffer with gaps": ([PART], [memoryview(bytearray(16))[::2]], "not memory"),
    "no memory": ([PART], [object()], "not memory"),
    "a sparse tensor": ([PART], [torch.ones(2).to_sparse()], "layout"),
    "an object with a tensor": ([fs.ObjectPart("b")], [{"x": [ONES]}], "describe it as a Part|is a tensor"),
    "an object that is an array": ([fs.ObjectPart("b")], [np.ones(3)], "is a tensor"),
    "an object with long bytes": ([fs.ObjectPart("b")], [bytes(100_000)], "as large as one"),
    "an object that cannot be stored": ([fs.ObjectPart("b")], [{"x": object()}], "cannot be stored"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_provider_is_named_with_the_path(name: str) -> None:
    parts, chunks, why = WRONG[name]
    if name == "a sparse tensor":  # refused as it is anywhere: by the path of the tensor
        wrong = pytest.raises(UnsupportedStateError, match=r"'s\.a' has layout")
        with fs.register_provider(Thing, Says(parts, chunks)), wrong:
            describe({"s": Thing()})
        return
    text = refused(Says(parts, chunks))
    assert re.search(why, text), text


def test_what_a_provider_raises_is_named_and_chained() -> None:
    def fails() -> object:
        raise KeyError("inner")

    def late() -> Iterable[object]:
        yield ONES
        raise KeyError("inner")

    for provider in (Says(fails), Says([PART], fails), Says([PART], late), Says([PART, fs.ObjectPart("b")], late)):
        assert "KeyError: 'inner'" in refused(provider)


@pytest.mark.parametrize(
    ("first", "second", "fine"),
    [
        ([PART], [fs.Part("a", "float32", (2,))], True),
        ([PART], [fs.Part("a", "float32", (3,))], False),
        ([PART], [fs.Part("a", "float64", (2,))], False),
        ([PART], [fs.Part("a", "float32", (2,), lazy=True)], False),
        ([PART], [fs.Part("a", "float32", (2,), resizable=True)], False),
        ([PART], [], False),
        ([PART], [fs.ObjectPart("a")], False),
        ([], [PART], True),
        ([fs.Part("a", "int8", (2, 3), resizable=True)], [fs.Part("a", "int8", (5, 0), resizable=True)], True),
        ([fs.Part("a", "int8", (2, 3), resizable=True)], [fs.Part("a", "int8", (2,), resizable=True)], False),
        ([fs.ObjectPart("a")], [fs.ObjectPart("a", constant=True)], False),
    ],
)
def test_an_object_is_described_the_same_as_long_as_it_lives(first: Any, second: Any, fine: bool) -> None:
    def chunk(part: Any) -> object:
        return 1 if isinstance(part, fs.ObjectPart) else torch.zeros(part.shape, dtype=getattr(torch, part.dtype))

    saying = [first]
    provider = Says(lambda: saying[0], lambda: [chunk(part) for part in saying[0]])
    value = Thing()
    with fs.register_provider(Thing, provider):
        describe_all({"s": [value]})
        saying[0] = second
        describe_all({"s": [Thing()]})  # another object is another matter
        if fine:
            describe_all({"s": [value]})
            return
        for call in (describe_all, lambda state: prepare(state, stored(Checkpoint(per_rank=[{}], objects={
            "s": '[{"$provided": "test_providers.Thing", "parts": {}, "objects": {}}]'
        })))):
            with pytest.raises(ProviderError, match="'a' differently than before") as caught:
                call({"s": [value]})
            assert "'s.0'" in str(caught.value)
            assert "test_providers.Says" in str(caught.value)


def test_no_object_is_kept_alive() -> None:
    value = Thing()
    watched = weakref.ref(value)
    with fs.register_provider(Thing, Good()):
        describe_all({"s": value})
        del value
        gc.collect()
        assert watched() is None
        describe_all({"s": Thing()})


def test_what_a_checkpoint_and_an_object_do_not_share_is_listed_by_path() -> None:
    with fs.register_provider(Thing, Good()):
        checkpoint = save({"s": {"t": Thing(1.0)}})

        def differences(target: object, checkpoint: Checkpoint = checkpoint) -> list[tuple[str, str]]:
            return [(d.kind, d.name) for d in prepare({"s": target}, stored(checkpoint)).differences]

        target = Thing()
        target.size = 8
        assert differences({"t": target}) == [("kind", "s.t.size")]
        target = Thing()
        target.table = np.zeros((3, 2), np.float32)
        assert differences({"t": target}) == [("dtype", "s.t.inner.table")]
        target = Thing()
        target.table = np.zeros(3)
        assert differences({"t": target}) == [("shape", "s.t.inner.table")]
        assert differences({"t": {"x": torch.ones(1)}}) == [("kind", "s.t")]
        assert differences({"t": 3}) == [("kind", "s.t")]
        assert differences({"t": torch.ones(1)}) == []  # tensors that are missing or too many are found with all others
        assert differences({"t": Thing()}, save({"s": {"t": 3}})) == [("kind", "s.t")]
        assert differences({"t": Thing()}, save({"s": {"x": torch.ones(1)}})) == [("missing", "s.t")]
    less = Says([fs.Part.of("fixed", ONES), fs.ObjectPart("new")], [ONES, 1])
    less.kind = "thing"
    with fs.register_provider(Thing, less):
        changes = differences({"t": Thing()})
    assert sorted(changes) == [("missing", "s.t.new"), ("unexpected", "s.t.note"), ("unexpected", "s.t.size")]


def test_a_checkpoint_needs_its_providers() -> None:
    with fs.register_provider(Thing, Good()):
        checkpoint = save({"s": {"t": Thing(1.0)}, "u": 1})
    target = {"s": {"t": Thing()}, "u": 0}
    diffs = prepare(target, stored(checkpoint)).differences
    assert [(d.kind, d.name) for d in diffs] == [("kind", "s.t")]
    assert "'thing'" in diffs[0].stored
    assert "register_provider" in diffs[0].stored
    other = Good()
    other.kind = "another"
    with fs.register_provider(Thing, other):
        diffs = prepare(target, stored(checkpoint)).differences
        assert [(d.kind, d.name, d.expected, d.stored) for d in diffs] == [("kind", "s.t", "'another'", "'thing'")]
    with fs.register_provider(Derived, Good()):
        diffs = prepare(target, stored(checkpoint)).differences
        assert "serves test_providers.Derived, not test_providers.Thing" in diffs[0].stored


def test_nothing_is_restored_before_finish_and_failures_are_named() -> None:
    def fails(value: object, result: object) -> None:
        raise KeyError("inner")

    source, target = Thing(1.0), Thing()
    parts = [fs.Part.of("fixed", ONES), fs.ObjectPart("note")]
    with fs.register_provider(Thing, Says(parts, lambda: [ONES, 1], fails)):
        checkpoint = save({"s": [source]})
        prepare({"s": [target]}, stored(checkpoint))
        with pytest.raises(ProviderError, match=r"cannot restore 's\.0'") as caught:
            load(checkpoint, {"s": [target]})
    assert isinstance(caught.value.__cause__, KeyError)
    assert "test_providers.Says" in str(caught.value)


def test_memory_in_blocks_is_one_tensor_of_several_boxes() -> None:
    class Blocks:
        def __init__(self, sizes: Sequence[int], fill: bool = False) -> None:
            ends = np.cumsum([0, *sizes])
            self.blocks = [np.zeros((n, 2), np.int32) for n in sizes]
            for block, begin in zip(self.blocks, ends, strict=False):
                block[...] = np.arange(begin * 2, begin * 2 + block.size).reshape(block.shape) * fill

    class Provides(fs.Provider[Blocks]):
        kind = "blocks"

        def describe(self, value: Blocks) -> Sequence[fs.Part]:
            ends = np.cumsum([0, *map(len, value.blocks)]).tolist()
            return [fs.Part("rows", "int32", (ends[-1], 2), Box((begin, 0), block.shape))
                    for begin, block in zip(ends, value.blocks, strict=False)]

        def chunks(self, value: Blocks) -> Iterable[object]:
            return value.blocks

        def restore(self, value: Blocks, actual: Mapping[str, object]) -> None:
            assert not actual

    with fs.register_provider(Blocks, Provides()):
        source = Blocks([3, 1, 4], fill=True)
        described = describe({"s": source, "other": source})
        assert [(p.name, p.box) for p in described.pieces][:3] == [
            ("s.rows", Box((0, 0), (3, 2))), ("s.rows", Box((3, 0), (1, 2))), ("s.rows", Box((4, 0), (4, 2)))
        ]
        assert described.aliases == ()
        checkpoint = save({"s": source, "p": fs.PerRank([source])})
        for sizes in ([3, 1, 4], [8], [2, 6]):  # any blocks take what others saved
            target, own = Blocks(sizes), Blocks(sizes)
            load(checkpoint, {"s": target, "p": fs.PerRank([own])})
            for item in (target, own):
                assert np.concatenate(item.blocks).tolist() == np.arange(16).reshape(8, 2).tolist()
        with pytest.raises(CollisionError, match=r"s\.rows"):
            describe({"s": source, "s.rows": fs.Shard(torch.ones(1, 2), (8, 2), (0, 0))})


@pytest.mark.parametrize("dtype", ["int16", "bfloat16", "float8_e4m3fn"])
def test_any_buffer_is_memory(dtype: str) -> None:
    item = getattr(torch, dtype).itemsize
    for source, target in [
        (bytes(range(6 * item)), bytearray(6 * item)), (bytearray(range(6 * item)), memoryview(bytearray(6 * item))),
        (array.array("B", range(6 * item)), array.array("B", bytes(6 * item))),
    ]:
        buffers: list[object] = [source]
        provider = Says([fs.Part("x", dtype, (2, 3))], buffers)
        with fs.register_provider(Thing, provider):
            checkpoint = save({"s": Thing()})
            buffers[0] = target
            load(checkpoint, {"s": Thing()})
            assert bytes(target) == bytes(range(6 * item))
            buffers[0] = source
            if isinstance(source, bytes):
                with pytest.raises(ProviderError, match="read-only memory") as caught:
                    prepare({"s": Thing()}, stored(checkpoint))
                assert "read-only builtins.bytes" in str(caught.value)
    empty = Says([fs.Part("x", dtype, (0, 3))], lambda: [b""])
    with fs.register_provider(Thing, empty):
        assert describe({"s": Thing()}).pieces[0].shape == (0, 3)


def test_a_read_only_array_of_a_provider_is_not_written() -> None:
    held = np.frombuffer(bytes(3), np.uint8)
    with fs.register_provider(Thing, Says([fs.Part.of("x", held)], lambda: [held])):
        checkpoint = save({"s": Thing()})
        with pytest.raises(ProviderError, match="read-only memory"):
            prepare({"s": Thing()}, stored(checkpoint))


def test_read_only_memory_is_fine_where_lengths_are_the_checkpoints() -> None:
    collected: list[object] = []
    provider = Says(
        [fs.Part("x", "uint8", (3,), resizable=True)], [b"abc"], lambda _, given: collected.append(given["x"].tobytes())
    )
    with fs.register_provider(Thing, provider):
        load(save({"s": Thing()}), {"s": Thing()})
    assert collected == [b"abc"]


def test_memory_of_an_object_and_a_tensor_of_the_state_are_tied() -> None:
    value = Thing()
    with fs.register_provider(Thing, Good()):
        checkpoint = save({"t": value.fixed, "s": value, "again": value})
        assert checkpoint.tied == {
            "s.fixed": "t", "again.fixed": "t", "again.inner.table": "s.inner.table",
        }
        target = Thing(1.0)
        load(checkpoint, {"t": target.fixed, "s": target, "again": target})
        value.note = 5
        apart = save({"t": value.fixed, "s": value, "again": Thing(0.0)})
        kinds = [(d.kind, d.name) for d in prepare({"s": target, "again": target}, stored(apart)).differences]
        assert kinds == [("kind", "again")], "one object cannot take two values"


def test_small_objects_are_made_after_all_tensors_were_taken_and_only_when_asked_for() -> None:
    made: list[str] = []

    def chunks(name: str) -> Iterable[object]:
        made.append(f"{name} memory")
        yield ONES
        made.append(f"{name} object")
        yield name

    class First(Thing):
        pass

    names = iter("ab")
    with fs.register_provider(Thing, Says([PART, fs.ObjectPart("b")], lambda: chunks(next(names)))):
        described = describe({"x": Thing(), "y": Thing()})
        assert made == ["a memory", "b memory"]
        assert described.objects["x"] == ProviderRecord(
            "test_providers.Thing", {"a": TensorRef("x.a", "tensor")}, {"b": "a"}
        )
        assert made == ["a memory", "b memory", "a object", "b object"]
        assert described.objects["y"].objects == {"b": "b"}  # type: ignore[attr-defined]
        assert len(made) == 4


def test_objects_that_lack_something_are_never_handed_out() -> None:
    with fs.register_provider(Thing, Says([fs.ObjectPart("b")], [object()])):
        described = describe({"s": Thing()})
        for _ in range(2):
            with pytest.raises(ProviderError):
                _ = described.objects
            with pytest.raises(ProviderError):
                _ = described.per_rank


def test_described_objects_are_not_the_users() -> None:
    value = Thing()
    with fs.register_provider(Thing, Good()):
        described = describe({"s": value})
        before = repr(described.objects)
        value.note["fill"] = 8  # type: ignore[index]
        assert repr(described.objects) == before


class Creates(Good):
    def create(self, result: Mapping[str, Any]) -> Thing:
        made = Thing()
        made.fixed, made.table, made.note, made.size = (result[n] for n in ("fixed", "inner.table", "note", "size"))
        return made


def test_where_no_object_is_a_provider_may_make_one() -> None:
    from test_split import Keeper

    with fs.register_provider(Thing, Good()):
        checkpoint = save({"s": Keeper(Thing(3.0))})
        differences = prepare({"s": Keeper()}, stored(checkpoint)).differences
        assert [(d.kind, d.name) for d in differences] == [("kind", "s.value")]
    target = Keeper()
    with fs.register_provider(Thing, Creates()):
        load(checkpoint, {"s": target})
    assert torch.equal(target.value.fixed, torch.full((2, 2), 3.0))  # type: ignore[attr-defined]
    assert target.value.note == {"fill": 3.0}  # type: ignore[attr-defined]


def test_every_rank_keeps_its_own() -> None:
    checkpoint = Checkpoint()
    with fs.register_provider(Thing, Good()):
        for rank in range(2):
            save({"s": fs.PerRank([Thing(float(rank))])}, rank=rank, into=checkpoint)
        for rank in range(3):
            target = Thing(9.0)
            load(checkpoint, {"s": fs.PerRank([target])}, rank=rank)
            assert target.note == {"fill": float(rank % 2)}
            assert torch.equal(target.fixed, torch.full((2, 2), float(rank % 2)))


def test_parts_of_a_rank_that_nobody_wants_are_listed() -> None:
    less = Says([fs.ObjectPart("note"), fs.ObjectPart("size", constant=True)], [1, 7])
    less.kind = "thing"
    with fs.register_provider(Thing, Good()):
        checkpoint = save({"s": fs.PerRank(Thing())})
    with fs.register_provider(Thing, less):
        diffs = prepare({"s": fs.PerRank(Thing())}, stored(checkpoint)).differences
    assert sorted((d.kind, d.name) for d in diffs) == [("unexpected", "s@0.fixed"), ("unexpected", "s@0.inner.table")]


def test_no_call_for_each_tensor_is_made_where_no_provider_has_the_word() -> None:
    """The walk is by columns: a thousand tensors more are no thousand calls of Python more."""

    def calls(state: Mapping[str, object]) -> int:
        count = 0

        def counting(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        describe(state)
        sys.setprofile(counting)
        try:
            describe(state)
        finally:
            sys.setprofile(None)
        return count

    def module(count: int) -> torch.nn.Module:
        made = torch.nn.Module()
        for i in range(count):
            made.register_parameter(f"p{i}", torch.nn.Parameter(torch.ones(1)))
        return made

    with fs.register_provider(Thing, Good()):
        for make in (lambda n: {"d": {str(i): torch.ones(1) for i in range(n)}}, lambda n: {"m": module(n)}):
            assert calls(make(2000)) - calls(make(1000)) < 100
