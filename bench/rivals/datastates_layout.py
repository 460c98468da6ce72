"""An emulation of DataStates-LLM's layout and flow, because its own engine cannot run without CUDA.

A file has a length (8 bytes), a JSON header with each tensor's dtype, shape and place, the tensors one after another
without alignment, and the pickled skeleton of the state. Tensors are copied into a pool of host memory that was
allocated before (and pinned, if there is a GPU). One thread writes them after the copy through the page cache, and
opens, seeks and closes for each. A reload reads tensor by tensor.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories
from bench.state import State, Tensors, flatten

LENGTH_BYTES = 8
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


class DataStatesLayout(SavesInDirectories):
    """One file for each group of tensors. The pool holds the whole state: nothing waits for room in it."""

    def __init__(self, directory: Path, *, by_section: bool) -> None:
        super().__init__(directory)
        self._by_section = by_section
        self._flusher = ThreadPoolExecutor(1)

    def prepare(self, state: State, verb: str, /) -> None:
        if verb == "save":
            buffer = mmap.mmap(-1, sum(map(_size, flatten(state).values())))
            self._pool = torch.frombuffer(buffer, dtype=torch.uint8)
            self._pool.fill_(1)  # touched, as pinned memory is

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        path.mkdir()
        flushed: list[Future[None]] = []
        used = 0
        for file, tensors in self._files(state):
            header, starts, end = _header(tensors)
            (path / file).write_bytes(header)
            for name, tensor in tensors.items():
                staged = self._pool[used : used + _size(tensor)]
                staged.copy_(_bytes(tensor))
                used += _size(tensor)
                flushed.append(self._flusher.submit(_write, path / file, starts[name], staged.numpy().data))
            skeleton = pickle.dumps({name: f"TENSOR.{name}" for name in tensors})
            flushed.append(self._flusher.submit(_write, path / file, end, memoryview(skeleton)))

        def until_durable() -> None:
            wait(flushed)
            for future in flushed:
                future.result()
            make_durable(path)

        return until_durable

    def load(self, state: State, number: int, _how: str, /) -> None:
        for file, tensors in self._files(state):
            with (self.place(number) / file).open("rb") as stream:
                length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
                header = json.loads(stream.read(length))
                for name, tensor in tensors.items():
                    row = header[name]
                    stream.seek(row["start"])
                    content = bytearray(stream.read(row["end"] - row["start"]))
                    loaded = torch.frombuffer(content, dtype=DTYPES[row["dtype"]])
                    tensor.copy_(loaded.view(row["shape"]))

    def _files(self, state: State) -> Iterator[tuple[str, Tensors]]:
        flat = flatten(state)
        if not self._by_section:
            yield from ((name, {name: tensor}) for name, tensor in flat.items())
            return
        for section in state:
            yield section, {name: tensor for name, tensor in flat.items() if name.startswith(f"{section}.")}

    def close(self) -> None:
        self._flusher.shutdown()


def _header(tensors: Tensors) -> tuple[bytes, Mapping[str, int], int]:
    """Length and header, where each tensor starts, and where the last one ends.

    Places depend on the header's length, and that on their digits: so they are given room.
    """
    header_bytes = LENGTH_BYTES + sum(len(name) + 160 for name in tensors)
    rows, starts, offset = {}, {}, header_bytes
    for name, tensor in tensors.items():
        starts[name], end = offset, offset + _size(tensor)
        rows[name] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "start": offset, "end": end}
        offset = end
    text = json.dumps(rows).encode().ljust(header_bytes - LENGTH_BYTES)
    assert len(text) == header_bytes - LENGTH_BYTES
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, starts, offset


def _write(path: Path, start: int, content: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        while content:
            count = os.pwrite(fd, content, start)
            content, start = content[count:], start + count
    finally:
        os.close(fd)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def open_rival(name: str, directory: Path) -> DataStatesLayout:
    return DataStatesLayout(directory, by_section=name == "datastates-section")
