"""Objects of several ranks that are merged into one."""

from __future__ import annotations

import msgspec
import pytest

from flowstone.errors import UnsupportedStateError
from flowstone.format.merge_points import Groups, MergePoint, merge, merge_map_of
from flowstone.format.objects import TensorRef, encode_text


def joined(*values: object) -> object:
    texts = {rank: bytes(encode_text(value, "s")) for rank, value in enumerate(values)}
    return msgspec.json.decode(merge("s", texts, {rank: merge_map_of(value) for rank, value in enumerate(values)}))


def groups(*of: tuple[str, float]) -> Groups:
    """Groups of members, a letter each, and a learning rate."""
    return Groups({"params": list(members), "options": {"lr": lr}} for members, lr in of)


def test_what_any_rank_has_in_a_joint_is_kept() -> None:
    assert joined(MergePoint(a=1, b=MergePoint(x=None)), MergePoint(b=MergePoint(y=[2]), c=3)) == {
        "a": 1, "b": {"x": None, "y": [2]}, "c": 3
    }
    assert joined(MergePoint(), MergePoint(a=TensorRef("s.a", "tensor"))) == {"a": {"$tensor": "s.a"}}


def test_what_two_ranks_have_has_to_be_the_same() -> None:
    with pytest.raises(UnsupportedStateError, match=r"'s\.b\.x' is not the same on rank 2 as on rank 1"):
        joined(MergePoint(a=1), MergePoint(b=MergePoint(x=1)), MergePoint(b=MergePoint(x=2)))
    with pytest.raises(UnsupportedStateError, match=r"fs\.PerRank\(state\['s'\]\)"):
        joined(1, 2)


@pytest.mark.parametrize(("value", "other"), [(1, True), (0, False), (1, 1.0)])
def test_values_of_other_types_are_not_the_same(value: object, other: object) -> None:
    with pytest.raises(UnsupportedStateError, match=r"'s\.a' is not the same"):
        joined(MergePoint(a=value), MergePoint(a=other))


def test_plain_dicts_are_values_and_not_joined() -> None:
    with pytest.raises(UnsupportedStateError, match="'s' is not the same"):
        joined({"a": 1}, {"a": 1, "b": 2})
    with pytest.raises(UnsupportedStateError, match=r"'s\.a' is not the same"):
        joined(MergePoint(a={}), MergePoint(a={"b": 2}))


def test_lists_of_joints_are_joined_one_by_one() -> None:
    assert joined([MergePoint(a=1), 0], [MergePoint(b=2), 0]) == [{"a": 1, "b": 2}, 0]
    with pytest.raises(UnsupportedStateError, match="'s' is not the same"):
        joined([MergePoint(a=1)], [MergePoint(a=1), MergePoint()])
    with pytest.raises(UnsupportedStateError, match=r"'s\.1' is not the same"):
        joined([MergePoint(), 1], [MergePoint(a=1), 2])


def test_keys_that_are_no_json_objects_make_a_value() -> None:
    assert joined(MergePoint({1: "a"}), MergePoint({1: "a"})) == {"$dict": [[1, "a"]]}
    with pytest.raises(UnsupportedStateError, match="'s' is not the same"):
        joined(MergePoint({1: "a"}), MergePoint({2: "a"}))


def test_groups_of_equal_options_become_one() -> None:
    assert joined(groups(("ab", 1.0), ("c", 2.0)), groups(("d", 1.0), ("ce", 2.0))) == groups(
        ("abd", 1.0), ("ce", 2.0)
    )


def test_groups_are_found_by_position_then_by_options() -> None:
    assert joined(groups(("a", 1.0), ("b", 1.0)), groups(("c", 1.0), ("d", 1.0))) == groups(("ac", 1.0), ("bd", 1.0))
    assert joined(groups(("a", 1.0), ("b", 2.0)), groups(("c", 2.0))) == groups(("a", 1.0), ("bc", 2.0))
    assert joined(groups(("a", 1.0)), groups(("b", 2.0), ("c", 1.0))) == groups(("ac", 1.0), ("b", 2.0))


def test_two_groups_of_one_rank_stay_two() -> None:
    assert joined(groups(("a", 1.0), ("b", 1.0)), groups(("c", 1.0))) == groups(("ac", 1.0), ("b", 1.0))
    assert joined(groups(("a", 1.0)), groups(("c", 1.0), ("d", 1.0))) == groups(("ac", 1.0), ("d", 1.0))


def test_a_member_with_other_options_on_another_rank_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="'a' is in a parameter group whose options on rank 1 differ"):
        joined(groups(("ab", 1.0)), groups(("a", 2.0)))
