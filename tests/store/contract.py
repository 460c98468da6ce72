"""The behaviour of every store. A test suite is a subclass with `open_store`."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import CHUNK_BYTES, KIB, MIB, READ_REQUEST_BYTES
from flowstone.errors import CancelledError, DamagedError, LockedError, StorageError
from flowstone.store.base import FilePlan, ReadReceipt, Receipt, Store, finish_reading, missing_methods

SEGMENT = "draft/rank-00000.safetensors"
ALIGNMENT = 4 * KIB
LENGTHS = (10, 5000, 3 * MIB + 17, 70 * KIB, 1)


def random_bytes(length: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)


def slots(lengths: Sequence[int]) -> tuple[list[int], int]:
    """An offset for each, none aligned, and the file's size."""
    offsets, end = [], 100
    for length in lengths:
        offsets.append(end)
        end += length + 5003
    return offsets, -(-end // ALIGNMENT) * ALIGNMENT


def chunk_counts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.array([-(-length // CHUNK_BYTES) for length in lengths], np.int64)


def write_rows(
    files: Sequence[int], offsets: Sequence[int], sources: Sequence[NDArray[np.uint8]]
) -> _native.WriteExtents:
    lengths = [source.nbytes for source in sources]
    counts = chunk_counts(lengths)
    return _native.WriteExtents(
        file=np.array(files, np.uint32), offset=np.array(offsets, np.uint64), length=np.array(lengths, np.uint64),
        address=np.array([source.ctypes.data for source in sources], np.uint64),
        chunk=(np.cumsum(counts) - counts).astype(np.uint64), layout=np.full(len(sources), -1, np.int64), layouts=[],
        chunks=int(counts.sum()),
    )


def read_rows(
    files: Sequence[int], offsets: Sequence[int], targets: Sequence[NDArray[np.uint8]], digests: NDArray[np.uint64]
) -> _native.ReadExtents:
    lengths = [target.nbytes for target in targets]
    counts = chunk_counts(lengths)
    rows = _native.ReadExtents(
        file=np.array(files, np.uint32), offset=np.array(offsets, np.uint64), length=np.array(lengths, np.uint64),
        chunk=(np.cumsum(counts) - counts).astype(np.uint64), first=np.zeros(len(targets), np.uint64),
        last=counts.astype(np.uint64), digests=digests,
    )
    rows.aim(
        np.array([target.ctypes.data for target in targets], np.uint64), np.full(len(targets), -1, np.int64), []
    )
    return rows


class StoreContract:
    """Names, small files and the lock; then segments.

    segment  the name of one, and `draft` the directory that has it
    """

    draft, segment = "draft", SEGMENT

    def open_store(self, root: Path) -> Store:
        """One more store at `root`, as another process would open it."""
        raise NotImplementedError

    def location(self, root: Path) -> str:
        """How that store is called."""
        return str(root)

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "runs" / "gpt"

    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        store = self.open_store(root)
        store.make_directory()
        yield store
        store.close()

    @pytest.fixture
    def arena(self) -> Iterator[_native.Arena]:
        arena = _native.Arena(budget_bytes=4 * READ_REQUEST_BYTES, block_bytes=READ_REQUEST_BYTES)
        yield arena
        arena.close()

    # Names

    def test_nothing_is_created_before_it_is_asked_for(self, root: Path) -> None:
        store = self.open_store(root)
        assert not store.exists()
        assert store.names() == ()
        assert not root.exists()
        assert store.location == self.location(root)
        store.close()

    def test_root_is_made_with_its_parents_and_may_be_there(self, store: Store) -> None:
        assert store.exists()
        store.make_directory()
        assert store.names() == ()

    def test_names_are_sorted_and_those_of_a_missing_directory_are_none(self, store: Store) -> None:
        for name in ("b", "a", ".c"):
            store.make_directory(name)
        assert store.names() == (".c", "a", "b")
        assert store.names("missing") == ()
        assert store.names("a") == ()

    def test_directory_that_is_there_is_not_made_again(self, store: Store) -> None:
        store.make_directory("a")
        with pytest.raises(StorageError, match="mkdir") as caught:
            store.make_directory("a")
        assert caught.value.errno == errno.EEXIST

    def test_small_file_is_read_back_whole_or_its_beginning(self, store: Store) -> None:
        store.make_directory("a")
        store.put("a/file", b"0123456789")
        store.put("a/empty", b"")
        store.sync_directory("a")
        assert store.exists("a/file")
        assert store.size("a/file") == 10
        assert store.read("a/file") == b"0123456789"
        assert store.read("a/file", length=3) == b"012"
        assert store.read("a/file", length=99) == b"0123456789"
        assert store.read("a/file", offset=4) == b"456789"
        assert store.read("a/file", offset=4, length=3) == b"456"
        assert store.read("a/file", offset=4, length=0) == store.read("a/file", offset=10, length=5) == b""
        assert store.read("a/file", length=3, bytes_max=10) == b"012"
        with pytest.raises(DamagedError, match="too long"):
            store.read("a/file", length=3, bytes_max=9)
        assert store.read("a/empty") == store.read("a/empty", length=3) == b""

    def test_file_that_is_there_is_not_written_again(self, store: Store) -> None:
        store.put("file", b"first")
        with pytest.raises(StorageError) as caught:
            store.put("file", b"second")
        assert caught.value.errno == errno.EEXIST
        assert store.read("file") == b"first"

    @pytest.mark.parametrize("verb", ["read", "size", "remove", "sync_directory"])
    def test_missing_path_is_an_error_that_names_it(self, store: Store, verb: str) -> None:
        with pytest.raises(StorageError, match="missing") as caught:
            getattr(store, verb)("missing")
        assert caught.value.errno == errno.ENOENT

    def test_a_stamp_is_another_one_once_the_file_is(self, store: Store) -> None:
        assert store.stamp("file") is None
        assert store.stamp("file/inner") is None
        store.put("file", b"1")
        first = store.stamp("file")
        assert first is not None
        assert store.stamp("file") == first
        store.remove("file")
        store.put("other", b"1")
        store.put("file", b"1")
        assert store.stamp("file") != first
        assert not store.is_link("file")
        assert not store.is_link("missing")

    def test_it_has_all_of_a_store_and_can_commit(self, store: Store) -> None:
        assert missing_methods(store) == {}
        assert store.capabilities.atomic_rename or store.capabilities.conditional_put

    def test_rename_moves_a_file_to_a_name_that_is_free(self, store: Store) -> None:
        store.put("file", b"content")
        store.rename("file", "other")
        assert store.names() == ("other",)
        assert store.read("other") == b"content"
        with pytest.raises(StorageError, match="file") as caught:
            store.rename("file", "new")
        assert caught.value.errno == errno.ENOENT

    def test_rename_moves_a_directory_with_its_files_where_it_is_atomic(self, store: Store) -> None:
        store.make_directory(".saving-1")
        store.put(".saving-1/file", b"content")
        if not store.capabilities.atomic_rename:
            with pytest.raises(StorageError) as caught:
                store.rename(".saving-1", "step-1")
            assert caught.value.errno == errno.EOPNOTSUPP
            assert store.names() == (".saving-1",)
            return
        store.rename(".saving-1", "step-1")
        store.sync_directory()
        assert store.names() == ("step-1",)
        assert store.read("step-1/file") == b"content"

    @pytest.mark.parametrize("source", ["directory", "file"])
    def test_rename_never_replaces(self, store: Store, source: str) -> None:
        store.make_directory("directory")
        store.put("file", b"1")
        store.make_directory("there")
        with pytest.raises(StorageError) as caught:
            store.rename(source, "there")
        assert caught.value.errno == errno.EEXIST
        assert store.names() == ("directory", "file", "there")

    def test_a_file_that_is_linked_is_there_until_its_last_name_is_removed(self, store: Store) -> None:
        if not store.capabilities.links:
            pytest.skip("a store without links")
        store.make_directory()
        store.make_directory("one")
        store.make_directory("other")
        store.put("one/file", b"content")
        store.link("one/file", "other/again")
        assert (store.names("one"), store.names("other")) == (("file",), ("again",))
        store.remove("one/file")
        assert not store.exists("one/file")
        assert (store.read("other/again"), store.size("other/again")) == (b"content", 7)
        store.remove("other/again")
        assert not store.exists("other/again")

    def test_a_link_never_replaces_and_needs_a_file(self, store: Store) -> None:
        if not store.capabilities.links:
            pytest.skip("a store without links")
        store.make_directory()
        store.put("one", b"1")
        store.put("other", b"2")
        with pytest.raises(StorageError, match="link") as caught:
            store.link("one", "other")
        assert caught.value.errno == errno.EEXIST
        assert store.read("other") == b"2"
        with pytest.raises(StorageError, match="link") as caught:
            store.link("missing", "again")
        assert caught.value.errno == errno.ENOENT
        assert not store.exists("again")

    def test_file_and_empty_directory_are_removed_and_a_full_one_is_not(self, store: Store) -> None:
        store.make_directory("a")
        store.put("a/file", b"1")
        with pytest.raises(StorageError) as caught:
            store.remove("a")
        assert caught.value.errno == errno.ENOTEMPTY
        store.remove("a/file")
        store.remove("a")
        assert store.names() == ()

    def test_free_bytes_is_a_number(self, store: Store) -> None:
        assert store.free_bytes() > 0

    # The lock

    def test_one_writer_at_a_time_and_the_other_is_named(self, store: Store, root: Path) -> None:
        with pytest.raises(LockedError):
            store.check_lock()
        store.lock("the first job")
        store.lock("the first job")
        store.check_lock()
        other = self.open_store(root)
        with pytest.raises(LockedError, match="the first job"):
            other.lock("the second job")
        store.unlock()
        other.lock("the second job")
        other.check_lock()
        with pytest.raises(LockedError, match="the second job"):
            store.lock("the first job")
        with pytest.raises(LockedError):
            store.check_lock()
        other.close()
        store.lock("the first job")

    # Segments

    def test_extents_come_back_and_digests_are_of_chunks(self, store: Store, arena: _native.Arena) -> None:
        sources, offsets, receipt = self._written(store, arena)
        assert receipt.error is None
        chunks = [s[i : i + CHUNK_BYTES] for s in sources for i in range(0, s.nbytes, CHUNK_BYTES)]
        assert receipt.digests.tolist() == [_native.xxh3_64(chunk) for chunk in chunks]
        assert receipt.io.copied_bytes == sum(LENGTHS)
        targets = [np.zeros_like(source) for source in sources]
        actual = self._read(store, arena, offsets, targets, receipt.digests)
        assert actual.error is None
        assert actual.bad.size == 0
        assert actual.touched.all()
        for source, target in zip(sources, targets, strict=True):
            np.testing.assert_array_equal(source, target)

    def test_segment_has_its_planned_size_and_zeros_between(self, store: Store, arena: _native.Arena) -> None:
        sources, offsets, _ = self._written(store, arena)
        expected = bytearray(slots(LENGTHS)[1])
        for source, offset in zip(sources, offsets, strict=True):
            expected[offset : offset + source.nbytes] = source.tobytes()
        assert store.size(self.segment) == len(expected)
        assert store.read(self.segment) == expected

    def test_two_segments_are_written_by_one_call(self, store: Store, arena: _native.Arena) -> None:
        sources = [random_bytes(100 * KIB, seed) for seed in range(2)]
        store.make_directory(self.draft)
        names = [f"{self.draft}/segment-{index}" for index in range(2)]
        files = [FilePlan(name, 128 * KIB) for name in names]
        writing = store.write(files, write_rows([0, 1], [4096, 8200], sources), arena)
        receipt = writing.receipt()
        assert receipt.error is None
        targets = [np.zeros_like(source) for source in sources]
        rows = read_rows([1, 0], [4096, 8200], targets, receipt.digests)
        actual = finish_reading(store.read_extents(names[::-1], rows, arena, wanted_bytes=200 * KIB))
        assert actual.error is None
        assert actual.bad.size == 0
        for source, target in zip(sources, targets, strict=True):
            np.testing.assert_array_equal(source, target)

    def test_a_segment_has_the_size_that_an_encoder_decides_and_begins_with_its_header(
        self, store: Store, arena: _native.Arena
    ) -> None:
        sources = [random_bytes(100 * KIB), random_bytes(3 * MIB + 17, 1)]
        digests = [_native.xxh3_64(sources[1][offset : offset + MIB]) for offset in range(0, sources[1].nbytes, MIB)]
        sources[1][MIB + 5] ^= 1
        store.make_directory(self.draft)
        moves, rests = f"{self.draft}/moves", f"{self.draft}/rests"
        files = [
            FilePlan(moves, 128 * KIB),
            FilePlan(rests, 4 * MIB, lambda size: f"{size} bytes".encode().ljust(ALIGNMENT)),
        ]
        tensor = np.zeros(ALIGNMENT, np.uint8)
        encoder = _native.delta_encoder(np.array([0, *digests], np.uint64), np.array([False, True, True, True, True]))
        rows = _native.WriteExtents(
            file=np.array([0, 1, 1], np.uint32), offset=np.array([4096, 0, ALIGNMENT], np.uint64),
            length=np.array([sources[0].nbytes, ALIGNMENT, sources[1].nbytes], np.uint64),
            address=np.array([item.ctypes.data for item in (sources[0], tensor, sources[1])], np.uint64),
            chunk=np.array([0, _native.NO_DIGEST, 1], np.uint64), layout=np.full(3, -1, np.int64), layouts=[], chunks=5,
        )
        rows.encode(encoder, 1)
        receipt = store.write(files, rows, arena).receipt()
        assert receipt.error is None
        encoded = receipt.encoded
        assert encoded is not None
        assert encoded.same.tolist() == [False, True, False, True, True]
        assert list(encoded.file_bytes) == [128 * KIB, ALIGNMENT + MIB]
        assert (store.size(moves), store.size(rests)) == (128 * KIB, ALIGNMENT + MIB)
        assert store.read(rests, length=ALIGNMENT).rstrip() == f"{ALIGNMENT + MIB} bytes".encode()
        offset = int(encoded.offset[2])
        assert store.read(rests, offset=offset, length=MIB) == sources[1][MIB : 2 * MIB].tobytes()
        assert store.read(moves, offset=4096, length=100 * KIB) == sources[0].tobytes()

    def test_source_may_change_once_it_is_captured(self, store: Store, arena: _native.Arena) -> None:
        source = random_bytes(6 * MIB)
        store.make_directory(self.draft)
        plan = [FilePlan(self.segment, 8 * MIB)]
        writing = store.write(plan, write_rows([0], [source.ctypes.data % 4096], [source]), arena)
        writing.wait_captured()
        before = source.copy()
        source[:] = 0
        receipt = writing.receipt()
        assert receipt.error is None
        assert writing.done_bytes >= source.nbytes
        target = np.zeros_like(source)
        assert self._read(store, arena, [source.ctypes.data % 4096], [target], receipt.digests).bad.size == 0
        np.testing.assert_array_equal(target, before)

    def test_segment_that_is_there_is_not_written_again(self, store: Store, arena: _native.Arena) -> None:
        self._written(store, arena)
        before = store.read(self.segment)
        with pytest.raises(StorageError, match="rank-00000") as caught:
            self._write(store, arena, [random_bytes(10)], [0])
        assert caught.value.errno == errno.EEXIST
        assert store.read(self.segment) == before

    def test_cancelled_write_says_so(self, store: Store, arena: _native.Arena) -> None:
        sources = [random_bytes(64 * MIB)]
        store.make_directory(self.draft)
        writing = store.write([FilePlan(self.segment, 65 * MIB)], write_rows([0], [0], sources), arena)
        writing.cancel()
        writing.wait_captured()
        receipt = writing.receipt()
        assert isinstance(receipt.error, CancelledError)
        assert receipt.digests.size == 0

    def test_flipped_bit_is_found_in_its_chunk(self, store: Store, arena: _native.Arena) -> None:
        sources, offsets, receipt = self._written(store, arena)
        content = bytearray(store.read(self.segment))
        content[offsets[2] + CHUNK_BYTES + 1] ^= 1
        content[offsets[3]] ^= 128
        store.remove(self.segment)
        store.put(self.segment, bytes(content))
        first = int(chunk_counts(LENGTHS)[:2].sum())
        for stop in (True, False):
            targets = [np.zeros_like(source) for source in sources]
            actual = self._read(store, arena, offsets, targets, receipt.digests, stop_at_bad=stop)
            bad = set(actual.bad.tolist())
            expected = {first + 1, first + 4}
            assert actual.error is None
            assert bad == expected if not stop else bad and bad <= expected

    def test_untouched_rows_are_told(self, store: Store, arena: _native.Arena) -> None:
        """A row whose only chunk is bad may keep its target, and says whether it did."""
        sources, offsets, receipt = self._written(store, arena)
        digests = receipt.digests.copy()
        digests[:] ^= 1
        targets = [np.zeros_like(source) for source in sources]
        actual = self._read(store, arena, offsets, targets, digests, stop_at_bad=False)
        assert actual.bad.size == digests.size
        for target, touched in zip(targets, actual.touched, strict=True):
            assert touched or not target.any()

    def test_file_that_is_too_short_is_damage_with_its_range(self, store: Store, arena: _native.Arena) -> None:
        sources, offsets, receipt = self._written(store, arena)
        content = store.read(self.segment)
        store.remove(self.segment)
        store.put(self.segment, content[: offsets[3] + 10])
        targets = [np.zeros_like(source) for source in sources]
        actual = self._read(store, arena, offsets, targets, receipt.digests)
        assert isinstance(actual.error, DamagedError)
        assert "rank-00000" in actual.error.message
        assert str(actual.error.facts["range"]).startswith("bytes ")

    def test_missing_segment_is_an_error_that_names_it(self, store: Store, arena: _native.Arena) -> None:
        rows = read_rows([0], [0], [random_bytes(10)], np.zeros(1, np.uint64))
        with pytest.raises(StorageError, match="missing") as caught:
            store.read_extents(["missing"], rows, arena, wanted_bytes=10)
        assert caught.value.errno == errno.ENOENT

    def _write(
        self, store: Store, arena: _native.Arena, sources: Sequence[NDArray[np.uint8]], offsets: Sequence[int]
    ) -> Receipt:
        if not store.exists(self.draft):
            store.make_directory(self.draft)
        _, size = slots([source.nbytes for source in sources])
        writing = store.write([FilePlan(self.segment, size)], write_rows([0] * len(sources), offsets, sources), arena)
        writing.wait_captured()
        return writing.receipt()

    def _written(
        self, store: Store, arena: _native.Arena
    ) -> tuple[list[NDArray[np.uint8]], list[int], Receipt]:
        sources = [random_bytes(length, seed) for seed, length in enumerate(LENGTHS)]
        offsets, _ = slots(LENGTHS)
        return sources, offsets, self._write(store, arena, sources, offsets)

    def _read(
        self, store: Store, arena: _native.Arena, offsets: Sequence[int], targets: Sequence[NDArray[np.uint8]],
        digests: NDArray[np.uint64], *, stop_at_bad: bool = True,
    ) -> ReadReceipt:
        rows = read_rows([0] * len(targets), offsets, targets, digests)
        expected = sum(target.nbytes for target in targets)
        reading = store.read_extents([self.segment], rows, arena, wanted_bytes=expected, stop_at_bad=stop_at_bad)
        return finish_reading(reading)
