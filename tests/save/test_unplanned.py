"""A save without a plan: the parts that a step copies and those that the writer's thread takes, in a forced order."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from flowstone import _native
from flowstone.config import MIB, Watch
from flowstone.errors import StateChangedError
from flowstone.save import pending_plan
from flowstone.save.pending_plan import PendingPlan
from flowstone.save.pending_plan import copy_until_planned as made_of
from flowstone.save.replica_samples import sample_replicas
from flowstone.stage.bounce import host_array
from flowstone.stage.early_snapshot import choose_copied, snapshot_one
from flowstone.state import StateDescription, describe
from own_process import run_in_own_process

ROOM = 1 << 30
watched = pytest.mark.skipif(bool(_native.written_pages_refusal()), reason=_native.written_pages_refusal() or "-")


def weights() -> dict[str, torch.Tensor]:
    """One as it lies, one that is strided, one short."""
    return {
        "plain": torch.randn(300, 200), "strided": torch.randn(200, 300, 2)[:, :, 0].t(), "short": torch.randn(10),
    }


def begun(state: dict[str, torch.Tensor], watch: Watch = "auto") -> PendingPlan:
    described = describe(state)
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    return made_of(1, described, samples, fence="manual", watch=watch, room_bytes=ROOM)


def values(described: StateDescription) -> dict[str, np.ndarray]:
    """What would be captured now."""
    pieces, places = described.pieces, described.places
    values = {piece.name: host_array(places.memory(index, piece)).copy() for index, piece in enumerate(pieces)}
    return {name: array.view(np.float32).reshape(-1) for name, array in values.items()}


def same(described: StateDescription, kept: dict[str, torch.Tensor]) -> bool:
    return all(np.array_equal(array, kept[name].numpy().reshape(-1)) for name, array in values(described).items())


def kept_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_what_is_held_is_what_is_taken_whatever_changes_afterwards() -> None:
    state = weights()
    kept, entry = kept_of(state), begun(state)
    assert entry.snapshot(ROOM)
    assert entry.snapshot_bytes == 300 * 200 * 4 + 300 * 200 * 4
    for tensor in state.values():
        tensor.add_(1)
    assert same(entry.take(), kept)
    entry.release()
    assert (entry.snapshot_bytes, entry.is_over, entry.is_pending) == (0, True, False)


def test_what_does_not_fit_is_not_copied_at_all() -> None:
    state = weights()
    kept, entry = kept_of(state), begun(state)
    assert not entry.snapshot(2 * 300 * 200 * 4 - 1)
    assert entry.snapshot_bytes == 0
    assert same(entry.take(), kept)


@pytest.mark.parametrize("piece", [0, 1])
def test_a_plan_that_comes_while_a_step_copies_ends_that_and_nothing_may_change_yet(piece: int) -> None:
    state = weights()
    kept, entry = kept_of(state), begun(state)
    taken: list[StateDescription] = []
    calls = []

    def interrupted(memory: object, is_off: object) -> object:
        calls.append(memory)
        if len(calls) == piece + 1:
            thread = threading.Thread(target=lambda: taken.append(entry.take()))  # the writer's: it does not wait
            thread.start()
            thread.join(60)
            assert taken, "beginning the save waits for no copy"
        return snapshot_one(memory, is_off)  # type: ignore[arg-type]

    with mock.patch.object(pending_plan, "snapshot_one", interrupted):
        assert not entry.snapshot(ROOM)
    assert not entry.snapshot(ROOM)
    assert len(calls) == piece + 1
    assert same(taken[0], kept)


def test_a_change_while_a_step_copies_fails_that_save_by_name() -> None:
    state = weights()
    entry = begun(state)

    def raced(memory: object, is_off: object) -> object:
        made = snapshot_one(memory, is_off)  # type: ignore[arg-type]
        state["plain"][0, 0] += 1  # one element, when it has been copied, or is about to be
        return made

    with mock.patch.object(pending_plan, "snapshot_one", raced):
        assert entry.snapshot(ROOM), "what is lost need not wait"
    with pytest.raises(StateChangedError, match="plain changed before it was captured"):
        entry.take()


def planned(entry: PendingPlan) -> None:
    """The plan comes, and its own watch has begun."""
    entry.take()
    entry.check_unwritten()


def row_through_data(tensor: torch.Tensor) -> None:
    tensor.data[123] += 1


def element_by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[299, 199] = 7  # the last one, on a page that it shares with other memory


def byte_by_address(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 1, 1)


@watched
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("change", [row_through_data, element_by_numpy, byte_by_address])
def test_a_change_of_few_bytes_before_the_plan_fails_that_save_by_name(
    change: Callable[[torch.Tensor], None], copied: bool
) -> None:
    """Whether the plan comes first, or a step that copies the state."""
    state = weights()
    entry = begun(state)
    change(state["plain"])
    if copied:
        assert entry.snapshot(ROOM), "what is lost need not wait"
    with pytest.raises(StateChangedError, match="plain changed before it was captured") as caught:
        planned(entry)
    assert caught.value.names == ("plain",)


@watched
def test_writes_beside_a_tensor_or_into_what_was_copied_fail_no_save() -> None:
    buffer = torch.randn(3 * 60_000 + 10)
    state = {"plain": buffer[5:60_005].view(300, 200), "short": torch.randn(10)}
    for copied in (False, True):
        entry = begun(state)
        buffer.data[:5] = buffer.data[60_005:60_010] = 3
        state["short"].data[:] = 3
        assert not copied or entry.snapshot(ROOM)
        if copied:
            state["plain"].data[0] = 3
        planned(entry)
        entry.release()


@watched
def test_a_plan_that_was_begun_and_a_save_that_has_ended_watch_no_more() -> None:
    state = weights()
    for ends in (PendingPlan.check_unwritten, PendingPlan.release):
        entry = begun(state)
        entry.take()
        assert entry._watch.changed() == []
        ends(entry)
        state["plain"].data[0] += 1
        assert entry._watch.changed() == []


def test_where_samples_are_chosen_no_page_is_watched() -> None:
    state = weights()
    entry = begun(state, "samples")
    state["plain"].numpy()[:] = state["plain"].clone().numpy()  # the same bytes: only a watch of pages notices
    planned(entry)


@pytest.mark.parametrize("before", [True, False])
def test_memory_that_is_freed_before_it_is_copied_fails_that_save_by_name(before: bool) -> None:
    """Also where it is still mapped, and looks as it did."""
    state = weights()
    entry = begun(state)
    if before:
        state["plain"].untyped_storage().resize_(0)
        assert entry.snapshot(ROOM)
    else:  # when a plan comes, and before any step
        state["plain"].untyped_storage().resize_(0)
    with pytest.raises(StateChangedError, match="the memory of plain was freed") as caught:
        entry.take()
    assert caught.value.gone


def _copied_at_once(strided: bool) -> tuple[tuple[str, ...], bool]:
    libc, length = ctypes.CDLL(None), 4 * MIB
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    mapped = torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.float32)
    away = mapped.reshape(2, -1)[:, ::2] if strided else mapped
    described = describe({"before": torch.randn(9), "away": away, "after": torch.randn(1000)})
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.munmap(address, length)  # by another thread, while `save` runs
    try:
        made_of(1, described, samples, fence="auto", watch="auto", room_bytes=ROOM)
    except StateChangedError as error:
        return error.names, error.gone
    return (), False


@pytest.mark.parametrize("strided", [False, True])
def test_memory_that_goes_away_while_save_itself_copies_it_fails_that_save_by_name(strided: bool) -> None:
    """In a process of its own: it has been ended by that."""
    assert run_in_own_process(_copied_at_once, strided) == (("away",), True)


def test_a_step_waits_where_the_system_has_no_memory_for_copies(caplog: pytest.LogCaptureFixture) -> None:
    state = weights()
    kept, entry = kept_of(state), begun(state)
    with mock.patch.object(pending_plan, "snapshot_one", side_effect=MemoryError):
        assert not entry.snapshot(ROOM)
        assert not entry.snapshot(ROOM)
    assert len([record for record in caplog.records if "raise budget_bytes" in record.message]) == 1
    assert same(entry.take(), kept)


def test_copies_that_save_makes_count_and_what_does_not_fit_is_left_for_save_to_wait_for() -> None:
    state = {"short": torch.randn(10), "long": torch.randn(300, 200), "longer": torch.randn(600, 200)}
    kept, described = kept_of(state), describe(state)
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    for room_bytes, copied in ((ROOM, 40 + 3 * 240_000), (300_000, 40 + 240_000), (1000, 40), (0, 0)):
        entry = made_of(1, described, samples, fence="auto", watch="auto", room_bytes=room_bytes)
        assert (entry.early_bytes, entry.holds_caller) == (copied, copied < 40 + 3 * 240_000)
        assert entry.is_copied == (not entry.holds_caller)
        assert same(entry.take(), kept)
        entry.release()
        assert entry.early_bytes == 0


def test_what_has_no_bytes_always_fits() -> None:
    lengths, expected = np.array([0, 64, 1 << 20, 0, 0, 65], np.uint64), np.array([1, 1, 1, 1, 0, 1], np.bool_)
    for room_bytes, fits in ((-5, [0, 3]), (0, [0, 3]), (63, [0, 3]), (64, [0, 1, 3]), (191, [0, 1, 3]),
                             (192, [0, 1, 3, 5]), (1 << 21, [0, 1, 2, 3, 5])):
        assert np.flatnonzero(choose_copied(lengths, expected, room_bytes)).tolist() == fits


def test_a_tensor_without_elements_is_not_taken_for_moved_where_nothing_fits() -> None:
    state = {"none": torch.empty(0, 4), "cut": torch.randn(30)[30:], "short": torch.randn(10)}
    described = describe(state)
    _, samples = sample_replicas(1, described, None, digests=False).sampled
    entry = made_of(1, described, samples, fence="auto", watch="auto", room_bytes=0)
    assert (entry.early_bytes, entry.holds_caller) == (0, True)
    assert same(entry.take(), kept_of(state))


def test_who_waits_is_let_go_on_once_all_is_copied_or_lost() -> None:
    for end in (lambda value: value.snapshot(ROOM), PendingPlan.release):
        described = describe({"long": torch.randn(300, 200), "short": torch.randn(10)})
        _, samples = sample_replicas(1, described, None, digests=False).sampled
        entry = made_of(1, described, samples, fence="auto", watch="auto", room_bytes=1000)
        assert (entry.holds_caller, entry.released.is_open) == (True, False)
        assert not entry.snapshot(1000)
        assert not entry.released.is_open
        end(entry)
        assert entry.released.is_open


def test_a_save_that_fails_while_a_step_copies_it_ends_the_copying_and_not_the_step() -> None:
    """As where another rank has refused it: the writer's thread lets it go in the middle of a copy."""
    entry = begun(weights())

    def let_go_behind(*arguments: object) -> object:
        made = snapshot_one(*arguments)  # type: ignore[arg-type]
        entry.release()
        return made

    with mock.patch.object(pending_plan, "snapshot_one", let_go_behind):
        assert not entry.snapshot(ROOM)
    assert entry.is_over
    assert entry.snapshot_bytes == 0
