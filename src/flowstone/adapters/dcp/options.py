"""The constructor arguments of FileSystemWriter and FileSystemReader: each is honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowstone.config import FIRST_ARENA_BYTES, WORKERS_MAX, EngineOptions, whole_number
from flowstone.errors import ArgumentError

_FORMATS = ("torch_save", "safetensors")


class WriterOptions(msgspec.Struct, frozen=True):
    """What a FlowstoneWriter was made with, as far as it is no path.

    budget_bytes      memory through which bytes go to the files
    accept_pickled    bytes that a planner of the user's has made are stored as they are
    """

    overwrite: bool
    step: int | None
    budget_bytes: int
    accept_pickled: bool
    engine: EngineOptions


def check_layout(
    single_file_per_rank: object, sync_files: object, extensions: Sequence[object] | None, serialization_format: object
) -> None:
    """Raise ArgumentError for a layout or a durability that Flowstone does not write."""
    if not single_file_per_rank:
        raise ArgumentError(
            "single_file_per_rank=False asks for a file for each tensor, which Flowstone does not write",
            next="leave it out: each rank writes one segment, of which any tensor is read by itself",
        )
    if not sync_files:
        raise ArgumentError(
            "sync_files=False asks for checkpoints that a power loss may tear",
            next="leave it out: every commit is durable",
        )
    if extensions:
        raise ArgumentError(
            f"_extensions holds {len(extensions)} stream transform(s), which Flowstone does not apply",
            next="leave them out: a part of a tensor could not be read by itself through them",
        )
    name = getattr(serialization_format, "value", serialization_format)
    if name is not None and name not in _FORMATS:
        raise ArgumentError(
            f"serialization_format {serialization_format!r} is unknown", expected=", ".join(_FORMATS),
            next="leave it out: segments are safetensors files",
        )


def check_registry(registry: object) -> None:
    """Raise ArgumentError for extensions that a reader is to undo."""
    if registry is not None:
        raise ArgumentError(
            "_extension_registry names stream transforms, which no Flowstone checkpoint has", next="leave it out"
        )


def engine_options(engine: EngineOptions | None, thread_count: object) -> EngineOptions:
    """How bytes move. `thread_count` threads copy and digest them, where it is more than DCP's default of one."""
    count = whole_number("thread_count", thread_count)
    if not 1 <= count <= WORKERS_MAX:
        raise ArgumentError(f"thread_count {count} is not within 1..{WORKERS_MAX}", next="leave it out")
    if engine is not None:
        if not isinstance(engine, EngineOptions):
            raise ArgumentError(f"engine {engine!r:.60} is not an EngineOptions", next="write fs.EngineOptions(...)")
        return engine
    return EngineOptions(workers=count) if count > 1 else EngineOptions()


def staging_bytes(per_thread_copy_ahead: object, thread_count: object) -> int:
    """Memory between the state and the files: no less than what was asked to be copied ahead of them."""
    ahead = whole_number("per_thread_copy_ahead", per_thread_copy_ahead)
    if ahead < 0:
        raise ArgumentError(f"per_thread_copy_ahead {ahead} is negative", next="leave it out")
    return max(FIRST_ARENA_BYTES, ahead * whole_number("thread_count", thread_count))
