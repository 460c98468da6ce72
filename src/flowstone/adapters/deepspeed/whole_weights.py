"""DeepSpeed's `zero_to_fp32`, which makes whole weights of partitions, and reads files past every CheckpointEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed.utils import zero_to_fp32

from flowstone.adapters.deepspeed.pointers import read_pointer


class _Torch(ModuleType):
    """A module torch, but for `load`, which gives what a file of ours stands for."""

    def __init__(self, own: Any, read: Callable[[str], Any]) -> None:
        super().__init__("torch")
        self._own, self._read = own, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, path: str, **options: Any) -> Any:
        return self._own.load(path, **options) if read_pointer(Path(path)) is None else self._read(path)


@contextmanager
def reads_pointers(read: Callable[[str], Any]) -> Iterator[None]:
    """Within it, `zero_to_fp32` reads files of ours by `read`: a load of stage 3 without the optimizer calls it."""
    own = zero_to_fp32.torch
    zero_to_fp32.torch = _Torch(own, read)
    try:
        yield
    finally:
        zero_to_fp32.torch = own
