"""Reed-Solomon codes over GF(256) by ISA-L: docs/decisions/035-parity.md. Bytes are given by address, and not owned.

Shards are numbered: those with data from 0 on, then those with parity. The matrix is Cauchy's, of which each square
part can be inverted, so any `data` shards give all others.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import metadata

from flowstone.errors import FrameworkError

SHARDS_MAX = 255  # there are no more elements to tell them apart
_SYSTEMS = "libisal.so.2"
_WHEELS = "pyeclib"  # its wheel has the library in it


@functools.cache
def library() -> ctypes.CDLL:
    """ISA-L, of the system or of PyECLib's wheel. Raises FrameworkError."""
    for name in (_SYSTEMS, *_in_wheel()):
        try:
            found = ctypes.CDLL(name)  # its calls leave the interpreter to other threads
        except OSError:
            continue
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        found.gf_gen_cauchy1_matrix.argtypes = (pointer, integer, integer)
        found.gf_invert_matrix.argtypes = (pointer, pointer, integer)
        found.ec_init_tables.argtypes = (integer, integer, pointer, pointer)
        found.ec_encode_data_update.argtypes = (integer, integer, integer, integer, pointer, pointer, pointer)
        return found
    raise FrameworkError(
        f"parity needs ISA-L, which is not installed: neither {_SYSTEMS} nor PyECLib's wheel",
        next="pip install 'flowstone[parity]' on all nodes, or the system's package (libisal2)",
    )


def is_there() -> bool:
    try:
        library()
    except FrameworkError:
        return False
    return True


def coefficient(data: int, rows: int, row: int, column: int) -> int:
    """That by which a shard counts in a row of parity."""
    return _matrix(data, rows)[(data + row) * data + column]


def accumulate(factor: int, source: int, target: int, length: int) -> None:
    """Add `factor` times the bytes at `source` to those at `target`."""
    library().ec_encode_data_update(length, 1, 1, 0, _tables((factor,)), source, (ctypes.c_void_p * 1)(target))


@functools.lru_cache(1000)
def factors_for(data: int, rows: int, shards: tuple[int, ...], lost: int) -> tuple[int, ...]:
    """By what each of these `data` shards counts in a lost one with data."""
    assert len(shards) == data, "as many as there is data"
    matrix = _matrix(data, rows)
    chosen = ctypes.create_string_buffer(b"".join(matrix[at * data : (at + 1) * data] for at in shards), data * data)
    inverse = ctypes.create_string_buffer(data * data)
    refused = library().gf_invert_matrix(chosen, inverse, data)
    assert not refused, "each square part of it can be inverted"
    return tuple(inverse.raw[lost * data : (lost + 1) * data])


@functools.lru_cache(1000)
def _matrix(data: int, rows: int) -> bytes:
    matrix = ctypes.create_string_buffer((data + rows) * data)
    library().gf_gen_cauchy1_matrix(matrix, data + rows, data)
    return matrix.raw


@functools.lru_cache(1000)
def _tables(factors: tuple[int, ...]) -> bytes:
    tables = ctypes.create_string_buffer(32 * len(factors))
    library().ec_init_tables(len(factors), 1, bytes(factors), tables)
    return tables.raw


def _in_wheel() -> list[str]:
    try:
        files = metadata.files(_WHEELS) or []
    except metadata.PackageNotFoundError:
        return []
    return [str(file.locate()) for file in files if file.name.startswith("libisal")]
