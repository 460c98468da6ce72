"""The constructor arguments of FileSystemWriter and FileSystemReader. Each one is applied, or raises an error."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowstone.config import FIRST_ARENA_BYTES, WORKERS_MAX, EngineOptions, whole_number
from flowstone.errors import ArgumentError

_FORMATS = ("torch_save", "safetensors")


class WriterOptions(msgspec.Struct, frozen=True):
    """The options of a FlowstoneWriter, other than its path.

    budget_bytes      size of the staging memory between the state and the files
    accept_pickled    whether to store bytes that a custom planner makes of objects, unchanged
    """

    overwrite: bool
    step: int | None
    budget_bytes: int
    accept_pickled: bool
    engine: EngineOptions


def check_layout(
    single_file_per_rank: object, sync_files: object, extensions: Sequence[object] | None, serialization_format: object
) -> None:
    """Raise ArgumentError if the arguments ask for a layout of files, or a kind of durability, that Flowstone does not
    write.
    """
    if not single_file_per_rank:
        raise ArgumentError(
            "single_file_per_rank=False is not supported: Flowstone does not write one file per tensor",
            next="leave it out: each rank writes one file, and any tensor in that file can be read separately",
        )
    if not sync_files:
        raise ArgumentError(
            "sync_files=False is not supported: after a power loss, such a checkpoint could be incomplete",
            next="leave it out: every commit is durable",
        )
    if extensions:
        raise ArgumentError(
            f"_extensions is not supported: it holds {len(extensions)} stream transform(s)",
            next="leave _extensions out: parts of a transformed tensor could not be read separately",
        )
    name = getattr(serialization_format, "value", serialization_format)
    if name is not None and name not in _FORMATS:
        raise ArgumentError(
            f"serialization_format {serialization_format!r} is unknown",
            expected=", ".join(_FORMATS), next="leave it out: Flowstone always writes safetensors files",
        )


def check_registry(registry: object) -> None:
    """Raise ArgumentError if a registry of extensions was given."""
    if registry is not None:
        raise ArgumentError(
            "_extension_registry is not supported: Flowstone checkpoints have no stream transforms", next="leave it out"
        )


def engine_options(engine: EngineOptions | None, thread_count: object) -> EngineOptions:
    """The engine's options. If `thread_count` is above DCP's default of 1, it is the number of threads that copy and
    compute digests.
    """
    count = whole_number("thread_count", thread_count)
    if not 1 <= count <= WORKERS_MAX:
        raise ArgumentError(f"thread_count must be 1 to {WORKERS_MAX}, got {count}", next="leave it out")
    if engine is not None:
        if not isinstance(engine, EngineOptions):
            raise ArgumentError(f"engine must be EngineOptions, got {engine!r:.60}", next="write fs.EngineOptions(...)")
        return engine
    return EngineOptions(workers=count) if count > 1 else EngineOptions()


def staging_bytes(per_thread_copy_ahead: object, thread_count: object) -> int:
    """The size of the staging memory in bytes: at least `per_thread_copy_ahead` for each thread."""
    ahead = whole_number("per_thread_copy_ahead", per_thread_copy_ahead)
    if ahead < 0:
        raise ArgumentError(f"per_thread_copy_ahead must be at least 0, got {ahead}", next="leave it out")
    return max(FIRST_ARENA_BYTES, ahead * whole_number("thread_count", thread_count))
