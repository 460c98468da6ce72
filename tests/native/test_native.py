"""The extension module conforms to _native.pyi; the engine's own tests are in native/tests."""

import errno
import gc
import os
import resource
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from flowstone import _native as native
from own_process import run_in_own_process

BACKENDS = ["posix"] + (["io_uring"] if native.has_io_uring() else [])
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(params=BACKENDS)
def engine(request):
    engine = native.Engine(backend=request.param, queue_depth=4, request_bytes=1 * MIB, workers=2)
    yield engine
    engine.close()


@pytest.fixture
def arena():
    return native.Arena(budget_bytes=8 * MIB, block_bytes=2 * MIB)


def open_file(path, size, *, direct, flags=os.O_RDWR | os.O_CREAT):
    """A preallocated file and its descriptor; the caller closes it."""
    alignment = native.probe_direct(str(path.parent)) if direct else 1
    if alignment == 0:
        pytest.skip("this file system refuses O_DIRECT")
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    if flags & os.O_RDWR:
        os.ftruncate(fd, size)
    return fd, native.File(fd=fd, path=str(path), alignment=alignment)


def write_rows(offsets, sources, *, layouts=None, **columns):
    """Rows of one file, digests numbered in order."""
    count = len(sources)
    lengths = np.array([source.nbytes for source in sources], np.uint64)
    chunks = -(-lengths.astype(np.int64) // native.CHUNK_BYTES)
    arguments = {
        "file": np.zeros(count, np.uint32),
        "offset": np.array(offsets, np.uint64),
        "length": lengths,
        "address": np.array([source.ctypes.data for source in sources], np.uint64),
        "chunk": (np.cumsum(chunks) - chunks).astype(np.uint64),
        "layout": np.full(count, -1, np.int64) if layouts is None else np.arange(count, dtype=np.int64),
        "layouts": layouts or [],
        "chunks": int(chunks.sum()),
    }
    return native.WriteExtents(**(arguments | columns))


def read_rows(offsets, targets, digests, **columns):
    count = len(targets)
    lengths = np.array([target.nbytes for target in targets], np.uint64)
    chunks = -(-lengths.astype(np.int64) // native.CHUNK_BYTES)
    arguments = {
        "file": np.zeros(count, np.uint32),
        "offset": np.array(offsets, np.uint64),
        "length": lengths,
        "chunk": (np.cumsum(chunks) - chunks).astype(np.uint64),
        "first": np.zeros(count, np.uint64),
        "last": chunks.astype(np.uint64),
        "digests": digests,
    }
    rows = native.ReadExtents(**(arguments | columns))
    rows.aim(np.array([target.ctypes.data for target in targets], np.uint64), np.full(count, -1, np.int64), [])
    return rows


def random_bytes(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)


def expected_digests(sources):
    chunks = [s[i : i + native.CHUNK_BYTES] for s in sources for i in range(0, s.nbytes, native.CHUNK_BYTES)]
    return np.array([native.xxh3_64(chunk) for chunk in chunks], np.uint64)


def test_xxh3_64_matches_published_vectors():
    assert native.xxh3_64(b"") == 0x2D06800538D394C2
    assert native.xxh3_64(b"xxhash") == native.xxh3_64(np.frombuffer(b"xxhash", np.uint8))
    assert native.xxh3_64(bytearray(b"a")) == 0xE6C632B61E964E1F
    assert native.xxh3_64(memoryview(b"abc")) == 0x78AF5F94892F3950


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_rows_come_back_and_digests_are_xxh3_of_chunks(engine, arena, tmp_path, direct):
    lengths = [0, 10, 5000, 3 * MIB + 17, 70 * KIB, 1, 2 * MIB]
    sources = [random_bytes(length, seed) for seed, length in enumerate(lengths)]
    offsets, end = [], 100
    for length in lengths:
        offsets.append(end)
        end += length + (0 if length < 64 * KIB else 5000)
    size = -(-end // 4096) * 4096
    fd, file = open_file(tmp_path / "segment", size, direct=direct)
    job = engine.write(arena, [(file, size)], write_rows(offsets, sources))
    assert job.wait_captured(60)
    assert job.wait(60)
    assert job.fault is None
    assert not job.cancelled
    np.testing.assert_array_equal(job.digests, expected_digests(sources))
    stored = (tmp_path / "segment").read_bytes()
    assert len(stored) == size
    expected = bytearray(size)
    for offset, source in zip(offsets, sources, strict=True):
        expected[offset : offset + source.nbytes] = source.tobytes()
    assert stored == bytes(expected)
    assert job.copied_bytes == sum(lengths)

    targets = [np.zeros_like(source) for source in sources]
    load = engine.read(arena, [file], read_rows(offsets, targets, job.digests))
    assert load.wait(60)
    assert load.fault is None
    assert load.bad_chunks.dtype == np.uint64
    assert load.bad_chunks.size == 0
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(source, target)
    assert load.touched.dtype == np.bool_
    assert load.touched.tolist() == [length > 0 for length in lengths]
    assert load.done_bytes == sum(lengths)
    assert load.requested_bytes >= sum(lengths)
    os.close(fd)


def test_strided_sources_and_targets_round_trip(engine, arena, tmp_path):
    source = np.arange(600 * 500, dtype=np.float32).reshape(600, 500)
    view = source.T[3:403, ::2]
    layout = native.GatherLayout(item_bytes=4, shape=view.shape, strides_bytes=view.strides)
    size = -(-view.nbytes // 4096) * 4096
    fd, file = open_file(tmp_path / "segment", size, direct=False)
    rows = write_rows([0], [view], layouts=[layout])
    job = engine.write(arena, [(file, size)], rows)
    assert job.wait(60)
    assert job.fault is None
    packed = np.fromfile(tmp_path / "segment", np.float32, view.size).reshape(view.shape)
    np.testing.assert_array_equal(packed, view)

    # A box of what is stored, into every other column of a larger array.
    target = np.zeros((100, 80), np.float32)
    box = target[:, ::2]
    scatter = native.ScatterLayout(
        item_bytes=4, extent_shape=view.shape, offset=(50, 7), shape=box.shape, strides_bytes=box.strides
    )
    rows = read_rows([0], [view], job.digests)
    rows.aim(np.array([box.ctypes.data], np.uint64), np.zeros(1, np.int64), [scatter])
    load = engine.read(arena, [file], rows)
    assert load.wait(60)
    assert load.fault is None
    assert load.bad_chunks.size == 0
    np.testing.assert_array_equal(box, view[50:150, 7:47])
    assert not target[:, 1::2].any()
    os.close(fd)


def test_a_wrong_byte_is_a_bad_chunk_and_the_target_stays(engine, arena, tmp_path):
    source = random_bytes(200 * KIB)
    size = 200 * KIB + 4096 - (200 * KIB) % 4096
    fd, file = open_file(tmp_path / "segment", size, direct=False)
    job = engine.write(arena, [(file, size)], write_rows([0], [source]))
    assert job.wait(60)
    os.pwrite(fd, bytes([source[77] ^ 1]), 77)
    target = np.zeros_like(source)
    load = engine.read(arena, [file], read_rows([0], [target], job.digests))
    assert load.wait(60)
    assert load.fault is None
    assert load.bad_chunks.tolist() == [0]
    assert not load.touched[0]
    assert not target.any()
    os.close(fd)


def test_reading_on_past_bad_chunks_names_them_all(engine, arena, tmp_path):
    source = random_bytes(6 * MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    job = engine.write(arena, [(file, source.nbytes)], write_rows([0], [source]))
    assert job.wait(60)
    for chunk in (0, 3, 5):
        os.pwrite(fd, bytes([source[chunk * MIB] ^ 1]), chunk * MIB)
    target = np.zeros_like(source)
    load = engine.read(arena, [file], read_rows([0], [target], job.digests), native.ReadOptions(stop_at_bad=False))
    assert load.wait(60)
    assert load.fault is None
    assert not load.cancelled
    assert load.bad_chunks.tolist() == [0, 3, 5]
    np.testing.assert_array_equal(target[MIB : 3 * MIB], source[MIB : 3 * MIB])
    os.close(fd)


def test_reserve_file_gives_the_size_and_reads_as_zero(tmp_path):
    fd, _ = open_file(tmp_path / "segment", 0, direct=False)
    native.reserve_file(fd, 1 * MIB)
    assert (tmp_path / "segment").read_bytes() == bytes(1 * MIB)
    os.close(fd)
    with pytest.raises(OSError, match="fallocate") as caught:
        native.reserve_file(fd, 4096)
    assert caught.value.errno == errno.EBADF


def test_verify_only_reads_and_keeps_nothing(engine, arena, tmp_path):
    source = random_bytes(5 * MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    job = engine.write(arena, [(file, source.nbytes)], write_rows([0], [source]))
    assert job.wait(60)
    rows = native.ReadExtents(
        file=np.zeros(1, np.uint32), offset=np.zeros(1, np.uint64), length=np.array([source.nbytes], np.uint64),
        chunk=np.zeros(1, np.uint64), first=np.zeros(1, np.uint64), last=np.array([len(job.digests)], np.uint64),
        digests=job.digests,
    )
    load = engine.read(arena, [file], rows)
    assert load.wait(60)
    assert load.fault is None
    assert load.bad_chunks.size == 0
    assert not load.touched.any()
    assert load.done_bytes == source.nbytes
    os.close(fd)


def test_a_read_only_descriptor_is_a_write_fault_with_its_range(engine, arena, tmp_path):
    (tmp_path / "segment").write_bytes(bytes(8192))
    fd, file = open_file(tmp_path / "segment", 8192, direct=False, flags=os.O_RDONLY)
    job = engine.write(arena, [(file, 8192)], write_rows([4096], [random_bytes(10)]))
    assert job.wait(60)
    fault = job.fault
    assert (fault.operation, fault.errno, fault.path) == ("write", errno.EBADF, str(tmp_path / "segment"))
    assert (fault.offset, fault.length) == (4096, 4096)
    assert "EBADF" not in repr(fault)
    assert "offset=4096" in repr(fault)
    os.close(fd)


def test_a_truncated_file_is_end_of_file(engine, arena, tmp_path):
    source = random_bytes(100 * KIB)
    fd, file = open_file(tmp_path / "segment", 100 * KIB, direct=False)
    job = engine.write(arena, [(file, 100 * KIB)], write_rows([0], [source]))
    assert job.wait(60)
    os.ftruncate(fd, 50 * KIB)
    target = np.zeros_like(source)
    load = engine.read(arena, [file], read_rows([0], [target], job.digests))
    assert load.wait(60)
    assert (load.fault.operation, load.fault.errno, load.fault.offset) == ("end of file", 0, 50 * KIB)
    assert not load.touched[0]
    os.close(fd)


def test_gap_blocks_are_left_alone_unless_asked(engine, arena, tmp_path):
    fd, file = open_file(tmp_path / "segment", 16384, direct=False)
    for gap_bytes, kept in [(0, True), (8192, False)]:
        os.pwrite(fd, b"\xff" * 16384, 0)
        rows = write_rows([0, 12288], [random_bytes(10, 1), random_bytes(10, 2)])
        assert engine.write(arena, [(file, 16384)], rows, native.WriteOptions(gap_bytes=gap_bytes)).wait(60)
        middle = os.pread(fd, 8192, 4096)
        assert middle == (b"\xff" if kept else b"\0") * 8192
    os.close(fd)


@pytest.fixture
def cooperative_threads():
    """Threads change only where one lets go of the interpreter lock."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def test_waiting_lets_other_python_threads_run(engine, arena, tmp_path, cooperative_threads):
    source = random_bytes(64 * MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    release, advanced = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (release.wait(), advanced.set()))
    thread.start()
    job = engine.write(arena, [(file, source.nbytes)], write_rows([0], [source]))
    release.set()
    assert job.wait(float("inf"))
    assert advanced.is_set()
    thread.join()
    os.close(fd)


def test_dropping_a_running_job_cancels_and_waits(engine, arena, tmp_path):
    source = random_bytes(32 * MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    for _ in range(5):
        job = engine.write(arena, [(file, source.nbytes)], write_rows([0], [source]))
        del job
        gc.collect()
    assert arena.free_bytes == arena.touched_bytes  # no block is in anyone's hands
    arena.close()
    os.close(fd)


def test_a_job_outlives_its_engine_arena_and_rows(tmp_path):
    engine = native.Engine(backend="posix", queue_depth=2, request_bytes=1 * MIB, workers=1)
    source = random_bytes(8 * MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    arena = native.Arena(budget_bytes=0, block_bytes=2 * MIB)
    job = engine.write(arena, [(file, source.nbytes)], write_rows([0], [source]))
    del engine, arena, file
    gc.collect()
    assert job.wait(0)
    assert job.fault is None
    np.testing.assert_array_equal(job.digests, expected_digests([source]))
    os.close(fd)


def test_capture_needs_no_files_and_nothing_is_written_before_they_are_ready(engine, arena, tmp_path):
    source = random_bytes(MIB)
    expected = source.copy()
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    rows = write_rows([0], [source])
    job = engine.write(arena, [(file, source.nbytes)], rows, native.WriteOptions(files_ready=False))
    assert job.wait_captured(60)
    source[:] = 0
    assert not job.wait(0)
    assert job.requests == 0
    assert not any((tmp_path / "segment").read_bytes())
    job.files_ready()
    assert job.wait(60)
    assert job.fault is None
    assert job.digests.tolist() == expected_digests([expected]).tolist()
    assert (tmp_path / "segment").read_bytes() == expected.tobytes()
    os.close(fd)


@pytest.mark.parametrize("captured", [True, False])
def test_a_job_whose_files_never_are_ready_ends_by_cancel(engine, arena, tmp_path, captured):
    source = random_bytes(64 * MIB if not captured else MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    rows = write_rows([0], [source])
    job = engine.write(arena, [(file, source.nbytes)], rows, native.WriteOptions(files_ready=False))
    assert not captured or job.wait_captured(60)
    job.cancel()
    assert job.wait(60)
    assert (job.cancelled, job.fault, job.requests) == (True, None, 0)
    job.files_ready()  # which changes nothing any more
    assert not any((tmp_path / "segment").read_bytes())
    assert arena.free_bytes == arena.touched_bytes
    os.close(fd)


def test_cancel_ends_the_job_without_a_fault(engine, arena, tmp_path):
    source = random_bytes(64 * MIB)
    fd, file = open_file(tmp_path / "segment", source.nbytes, direct=False)
    job = engine.write(arena, [(file, source.nbytes)], write_rows([0], [source]))
    job.cancel()
    assert job.wait_captured(60)
    assert job.wait(60)
    assert job.cancelled
    assert job.fault is None
    os.close(fd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": np.array([4096, 0], np.uint64)}, "not sorted"),
        ({"offset": np.array([0, 50], np.uint64)}, "overlap"),
        ({"offset": np.array([0, 8190], np.uint64)}, "beyond the file"),
        ({"offset": np.array([0, 2**64 - 1], np.uint64)}, "beyond the largest file"),
        ({"file": np.array([0, 1], np.uint32)}, "file is not an index"),
        ({"layout": np.array([-1, 0], np.int64)}, "layout is not an index"),
        ({"layout": np.array([-2, -1], np.int64)}, "layout is not an index"),
        ({"chunk": np.array([0, 2], np.uint64)}, "beyond the number of chunks"),
        ({"address": np.array([0, 0], np.uint64)}, "null"),
    ],
)
def test_wrong_write_rows_are_value_errors(engine, arena, tmp_path, change, message):
    fd, file = open_file(tmp_path / "segment", 8192, direct=False)
    rows = write_rows([0, 4096], [random_bytes(100, 1), random_bytes(100, 2)], **change)
    with pytest.raises(ValueError, match=message):
        engine.write(arena, [(file, 8192)], rows)
    os.close(fd)


def test_wrong_columns_are_value_errors():
    with pytest.raises(ValueError, match="offset: wrong dtype"):
        write_rows([0], [random_bytes(1)], offset=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="length: the columns differ"):
        write_rows([0], [random_bytes(1)], length=np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="digests: wrong dtype"):
        read_rows([0], [random_bytes(1)], np.zeros(1, np.int64))
    strided = np.arange(4, dtype=np.uint64)[::2]
    write_rows([0, 2], [random_bytes(1), random_bytes(1)], offset=strided)  # any stride will do


def test_rows_of_a_supply_are_on_the_host_and_not_lazy(engine, arena, tmp_path):
    fd, file = open_file(tmp_path / "segment", 8192, direct=False)
    source = random_bytes(100)
    rows = write_rows([0], [source])
    with pytest.raises(ValueError, match="a different number of rows"):
        rows.attach_supply(native.SourceSupply(np.zeros(2, np.uint64)))
    rows.attach_supply(native.SourceSupply(np.array([source.nbytes], np.uint64)))
    rows.mark_lazy(np.ones(1, np.bool_))
    with pytest.raises(ValueError, match="must be on the host, and not lazy"):
        engine.write(arena, [(file, 8192)], rows)
    os.close(fd)


def test_wrong_options_are_value_errors(engine, arena, tmp_path):
    with pytest.raises(ValueError, match="backend"):
        native.Engine(backend="carrier pigeon", queue_depth=1, request_bytes=4096, workers=1)
    with pytest.raises(ValueError, match="request_bytes"):
        native.Engine(backend="posix", queue_depth=1, request_bytes=4097, workers=1)
    with pytest.raises(ValueError, match="queue_depth"):
        native.Engine(backend="posix", queue_depth=0, request_bytes=4096, workers=1)
    with pytest.raises(ValueError, match="block_bytes"):
        native.Arena(budget_bytes=MIB, block_bytes=4096)
    with pytest.raises(ValueError, match="leaves the extent"):
        native.ScatterLayout(item_bytes=4, extent_shape=(4,), offset=(2,), shape=(3,), strides_bytes=(4,))
    closed = native.Arena(budget_bytes=0, block_bytes=2 * MIB)
    closed.close()
    fd, file = open_file(tmp_path / "segment", 4096, direct=False)
    with pytest.raises(ValueError, match="arena is closed"):
        engine.write(closed, [(file, 4096)], write_rows([0], [random_bytes(1)]))
    with pytest.raises(ValueError, match="multiple of 4096"):
        engine.write(arena, [(file, 100)], write_rows([0], [random_bytes(1)]))
    engine.close()
    with pytest.raises(ValueError, match="engine is closed"):
        engine.write(arena, [(file, 4096)], write_rows([0], [random_bytes(1)]))
    os.close(fd)


def test_probe_of_a_missing_directory_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="missing") as caught:
        native.probe_direct(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT


def test_probe_leaves_nothing_behind(tmp_path):
    assert native.probe_direct(str(tmp_path)) in (0, 512, 1024, 2048, 4096)
    assert list(tmp_path.iterdir()) == []


def _rows_beyond_the_limit():
    digests = np.zeros(1 << 27, np.uint64)  # 1 GiB of address space, of which nothing is touched
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="memory") as caught:  # the engine's copy of the digests
        read_rows([0], [random_bytes(1)], digests)
    return caught.value.errno


def test_memory_that_the_system_refuses_is_an_os_error():
    assert run_in_own_process(_rows_beyond_the_limit) == errno.ENOMEM


@pytest.mark.parametrize("how", ["samples", "auto"])
def test_rows_are_watched_from_before_their_job_on(engine, arena, tmp_path, how):
    source = np.arange(1_000_000, dtype=np.uint64)
    fd, file = open_file(tmp_path / "file", 8 * MIB, direct=False)
    rows = write_rows([0], [source])
    rows.mark_lazy(np.array([True]))
    rows.watch(how)
    source += 1
    job = engine.write(arena, [(file, 8 * MIB)], rows, native.WriteOptions(watch=how))
    assert job.wait(60)
    assert job.fault is not None
    assert job.fault.operation == "capture"
    again = engine.write(arena, [(file, 8 * MIB)], rows, native.WriteOptions(watch=how))  # each watch is of one job
    assert again.wait(60)
    assert again.fault is None
    assert os.pread(fd, source.nbytes, 0) == source.tobytes()
    os.close(fd)


@pytest.mark.skipif(bool(native.written_pages_refusal()), reason=native.written_pages_refusal() or "-")
def test_rows_that_were_written_since_their_watch_began_are_known_without_a_job():
    sources = [np.arange(100_000, dtype=np.uint64) for _ in range(4)]
    places = np.cumsum([0, *(1 << 20 for _ in sources[1:])]) + [source.ctypes.data % 4096 for source in sources]
    rows = write_rows(places, sources)
    rows.mark_lazy(np.ones(4, np.bool_))
    with pytest.raises(ValueError, match="not watched"):
        rows.changed_rows()
    rows.watch("auto")
    assert rows.changed_rows() == []
    other = write_rows(places, sources)
    other.mark_lazy(np.ones(4, np.bool_))
    sources[1][50_000] = 7
    other.watch("auto")  # a second watch hides nothing
    sources[3][-1] = 7  # on a page that it shares with other memory
    assert rows.changed_rows() == [1, 3]
    assert other.changed_rows() == [3]
    rows.unwatch()
    with pytest.raises(ValueError, match="not watched"):
        rows.changed_rows()


def test_identity_stores_every_chunk_as_it_was_planned(engine, arena, tmp_path):
    source = np.arange(300_000, dtype=np.uint64)
    fd, file = open_file(tmp_path / "file", 4 * MIB, direct=False)
    rows = write_rows([4096], [source])
    rows.encode(native.identity_encoder(), 0)
    job = engine.write(arena, [(file, 4 * MIB)], rows)
    assert job.wait(60)
    assert job.stored is None
    assert job.file_ends == []
    assert os.pread(fd, source.nbytes, 4096) == source.tobytes()
    os.close(fd)
