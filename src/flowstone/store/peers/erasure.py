"""Reed-Solomon codes over GF(256), computed with ISA-L (docs/decisions/035-parity.md). Callers own the memory.

The data shards (`data` of them) are numbered from 0 on, and the parity shards after them. The factors of the shards
form a Cauchy matrix, of which each square part can be inverted, so any `data` shards determine all others.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import metadata

from flowstone.errors import FrameworkError

SHARDS_MAX = 255  # GF(256) has no more nonzero elements
_SYSTEMS = "libisal.so.2"
_WHEELS = "pyeclib"  # the Python package whose wheel contains the library


@functools.cache
def library() -> ctypes.CDLL:
    """The library ISA-L, from the system or from PyECLib's wheel. Raises FrameworkError."""
    for name in (_SYSTEMS, *_in_wheel()):
        try:
            isal = ctypes.CDLL(name)  # calls of this library release the global interpreter lock
        except OSError:
            # the library is not installed under this name; if it is under no name, FrameworkError is raised below
            continue
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        isal.gf_gen_cauchy1_matrix.argtypes = (pointer, integer, integer)
        isal.gf_invert_matrix.argtypes = (pointer, pointer, integer)
        isal.ec_init_tables.argtypes = (integer, integer, pointer, pointer)
        isal.ec_encode_data_update.argtypes = (integer, integer, integer, integer, pointer, pointer, pointer)
        return isal
    raise FrameworkError(
        f"parity needs ISA-L, which is not installed: neither {_SYSTEMS} nor PyECLib's wheel",
        next="pip install 'flowstone[parity]' on all nodes, or the system's package (libisal2)",
    )


def is_available() -> bool:
    try:
        library()
    except FrameworkError:
        return False
    return True


def coefficient(data: int, rows: int, row: int, column: int) -> int:
    """The factor by which data shard number `column` is multiplied in parity shard number `row`."""
    return _matrix(data, rows)[(data + row) * data + column]


def accumulate(factor: int, source: int, target: int, length: int) -> None:
    """Add `factor` times the bytes at address `source` to the bytes at address `target`."""
    library().ec_encode_data_update(length, 1, 1, 0, _tables((factor,)), source, (ctypes.c_void_p * 1)(target))


@functools.lru_cache(1000)
def factors_for(data: int, rows: int, shards: tuple[int, ...], lost: int) -> tuple[int, ...]:
    """The factors for computing the data shard `lost`: it is the sum of the given `shards` (there are `data` of them),
    each multiplied by its factor.
    """
    assert len(shards) == data, "as many shards as data shards"
    matrix = _matrix(data, rows)
    shard_rows = b"".join(matrix[index * data : (index + 1) * data] for index in shards)
    chosen = ctypes.create_string_buffer(shard_rows, data * data)
    inverse = ctypes.create_string_buffer(data * data)
    failure = library().gf_invert_matrix(chosen, inverse, data)
    assert not failure, "each square part of a Cauchy matrix can be inverted"
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
