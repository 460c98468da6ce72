"""Matching: strict, complete, and with exceptions only by a named rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flowstone.errors import MismatchError
from flowstone.format.index import Index
from flowstone.plan.match import CheckpointTensors, Match, StateRequest, apply_renames, match
from flowstone.plan.write import data_offsets, plan_writes
from flowstone.rules.load_rules import Cast, Init, Rename, Rule, Skip
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Alias, Piece
from indexes import index_of


def piece(name: str, shape: tuple[int, ...] = (2,), kind: str = "float32") -> Piece:
    return Piece(name, DTYPES[kind], shape, Box.whole(shape))


def index(*pieces: Piece, aliases: Sequence[Alias] = (), digests: Sequence[int] = ()) -> Index:
    plan = plan_writes(pieces)
    result = np.array(digests or range(plan.chunks), np.uint64)
    return index_of(plan, data_offsets(plan, np.zeros(len(pieces), np.uint64)), result, aliases)


def matched(
    expected: Sequence[Piece],
    stored: Index,
    *rules: Rule,
    aliases: Sequence[Alias] = (),
    sections: Sequence[str] = ("m",),
) -> Match:
    names = apply_renames(stored.rows(), rules)
    return match(StateRequest(expected, aliases, sections), CheckpointTensors(stored, names), rules)


def differences(*args: object, **more: object) -> list[str]:
    with pytest.raises(MismatchError) as caught:
        matched(*args, **more)  # type: ignore[arg-type]
    return list(caught.value.differences)


def test_rows_are_found_by_name_in_any_order() -> None:
    match = matched([piece("m.b"), piece("m.a")], index(piece("m.a"), piece("m.b")))
    assert (match.positions, match.rows) == ((0, 1), (1, 0))


def test_every_difference_is_listed_not_only_the_first() -> None:
    stored = index(piece("m.shape", (3,)), piece("m.kind", kind="int8"), piece("m.extra"), piece("m.same"))
    expected = [piece("m.gone"), piece("m.shape"), piece("m.kind"), piece("m.same")]
    assert differences(expected, stored) == [
        "missing     m.gone: float32 (2,), is not in the checkpoint",
        "shape       m.shape: wanted (2,), stored (3,)",
        "dtype       m.kind: wanted float32, stored int8",
        "unexpected  m.extra: in the checkpoint, not in your state",
    ]


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_error() -> None:
    with pytest.raises(MismatchError) as caught:
        matched([piece(f"m.{i}") for i in range(60)], index())
    assert "differ in 60 places; nothing was changed" in str(caught.value)
    assert "... and 10 more" in str(caught.value)
    assert len(caught.value.differences) == 60


def test_sections_that_are_not_asked_for_are_not_looked_at() -> None:
    stored = index(piece("m.a"), piece("other.b"), piece("m@0.c"))
    assert matched([piece("m.a")], stored).rows == (0,)
    assert differences([piece("m.a")], stored, sections=("m", "other")) == [
        "unexpected  other.b: in the checkpoint, not in your state"
    ]


def test_init_keeps_what_is_missing() -> None:
    match = matched([piece("m.new"), piece("m.a")], index(piece("m.a")), Init("m.n*"))
    assert (match.initialised, match.positions, match.rows) == (("m.new",), (1,), (0,))
    assert len(differences([piece("m.new")], index(), Init("M.N*"))) == 1, "patterns mind their case"


def test_skip_passes_over_what_is_unexpected() -> None:
    match = matched([piece("m.a")], index(piece("m.a"), piece("m.old.x"), piece("m.old.y")), Skip("m.old.*"))
    assert match.skipped == ("m.old.x", "m.old.y")
    assert differences([piece("m.a")], index(piece("m.a"), piece("m.other")), Skip("m.old.*")) != []


def test_cast_allows_another_dtype_but_no_other_shape() -> None:
    match = matched([piece("m.a")], index(piece("m.a", kind="bfloat16")), Cast("m.*"))
    assert match.cast == ("m.a",)
    assert differences([piece("m.a", (4,))], index(piece("m.a", kind="bfloat16")), Cast("m.*")) == [
        "shape       m.a: wanted (4,), stored (2,)"
    ]


def test_rename_moves_a_path_and_all_under_it() -> None:
    stored = index(piece("m.old.w"), piece("m.older.w"), piece("m.opt.state.m.old.w.exp_avg"))
    names = apply_renames(stored.rows(), [Rename("m.old", "m.new")])
    assert list(names) == ["m.new.w", "m.older.w", "m.opt.state.m.new.w.exp_avg"]


def test_renames_apply_in_order() -> None:
    names = apply_renames({"a.w": 0, "b.w": 1}, [Rename("a", "c"), Rename("b", "a"), Rename("c", "b")])
    assert names == {"b.w": 0, "a.w": 1}


def test_names_that_change_places_are_compared_by_row_not_by_order() -> None:
    stored = index(piece("m.a", (2,)), piece("m.b", (3,)))
    swap = [Rename("m.a", "m.c"), Rename("m.b", "m.a"), Rename("m.c", "m.b")]
    assert matched([piece("m.b", (2,)), piece("m.a", (3,))], stored, *swap).rows == (0, 1)
    assert matched([piece("m.a", (3,)), piece("m.b", (2,))], stored, *swap).rows == (1, 0)
    assert len(differences([piece("m.a", (2,)), piece("m.b", (3,))], stored, *swap)) == 2
    assert matched([piece("m.a", (2,)), piece("m.b", (3,))], stored).rows == (0, 1)
    assert len(differences([piece("m.a", (3,)), piece("m.b", (2,))], stored)) == 2


def test_a_rename_that_makes_two_names_one_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"rules fs\.Rename give two stored tensors the name 'm\.b\.w'"):
        apply_renames({"m.a.w": 0, "m.b.w": 1}, [Rename("m.a", "m.b")])


def test_a_name_with_an_at_sign_is_a_name_like_any_other() -> None:
    stored = index(piece("m.a"), piece("m.b@1"))
    assert differences([piece("m.a")], stored) == ["unexpected  m.b@1: in the checkpoint, not in your state"]


def test_a_tied_tensor_must_be_stored_under_both_names() -> None:
    tie = [Alias("m.tied", "m.a")]
    assert differences([piece("m.a")], index(piece("m.a")), aliases=tie) == [
        "missing     m.tied (shares memory with m.a): is not in the checkpoint"
    ]
    assert matched([piece("m.a")], index(piece("m.a"), aliases=tie), aliases=tie).rows == (0,)
    allowed = matched([piece("m.a")], index(piece("m.a")), Init("m.tied"), aliases=tie)
    assert (allowed.rows, allowed.initialised) == ((0,), ("m.tied",))


def test_tied_memory_cannot_hold_two_values() -> None:
    tie, two = [Alias("m.tied", "m.a")], (piece("m.a"), piece("m.tied"))
    assert differences([piece("m.a")], index(*two, digests=(1, 2)), aliases=tie) == [
        "tied        m.tied: shares memory with m.a, but their stored values differ"
    ]
    assert matched([piece("m.a")], index(*two, digests=(5, 5)), aliases=tie).rows == (0,)
