"""Support for DeepSpeed's function `zero_to_fp32`, which merges the ranks' partitions, and which reads files without a
CheckpointEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed.utils import zero_to_fp32

from flowstone.adapters.deepspeed.pointers import read_pointer


class _TorchWithPointers(ModuleType):
    """The module torch with another function `load`. If a path is a pointer file (pointers.py), it reads the file's
    content from the checkpoint that the pointer names.
    """

    def __init__(self, own: Any, read: Callable[[str], Any]) -> None:
        super().__init__("torch")
        self._own, self._read = own, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, path: str, **options: Any) -> Any:
        return self._own.load(path, **options) if read_pointer(Path(path)) is None else self._read(path)


@contextmanager
def reads_pointers(read: Callable[[str], Any]) -> Iterator[None]:
    """Context in which `zero_to_fp32` reads pointer files with `read`. Needed because DeepSpeed calls that function
    when stage 3 loads without the optimizer.
    """
    own = zero_to_fp32.torch
    zero_to_fp32.torch = _TorchWithPointers(own, read)
    try:
        yield
    finally:
        zero_to_fp32.torch = own
