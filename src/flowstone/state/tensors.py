"""Tensors and arrays as memory: the only module that examines their inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.errors import ArgumentError, UnsupportedStateError
from flowstone.format.objects import unsupported
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.pieces import Memory

TORCH_DTYPES: Mapping[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)
}
_TORCH_OF: Mapping[str, torch.dtype] = {dtype.name: own for own, dtype in TORCH_DTYPES.items()}
_NUMPY_NAMES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
DENSE_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor types that are plain memory; subclasses may not be."""
_ARRAY_TYPES = (np.ndarray, np.memmap)
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_CARRIERS = {1: torch.uint8, 2: torch.int16}  # whose memory types below a byte, and types of bits, can have
_LOW = np.uint64(1 << 40)  # memory is nearly always above, and no storage is this long
_dtype, _device, _is_cpu = attrgetter("dtype"), attrgetter("device"), attrgetter("is_cpu")
_version = attrgetter("_version")
_UNKNOWN = -1  # the version of inference tensors, which have no counter
_BLOCK = 256  # tensors whose own records stay in the CPU cache while they are examined
_TRAINABLE = (
    "of a model whose frozen weights are quantised, save what trains: {name: p for name, p in model.named_parameters() "
    "if p.requires_grad}, and its optimizer"
)
_CONVERT = "convert it to a dense tensor (to_dense(), dequantize(), full_tensor(), ...), or leave it out of the state"


def device_of(device: object) -> torch.device:
    """The device that a caller names. Raises ArgumentError."""
    try:
        return torch.device(cast("str", device))
    except (RuntimeError, TypeError, UnicodeError) as error:
        raise ArgumentError(
            f"device {device!r:.60} is none", found=f"{error!s:.200}", next="give 'cpu', 'cuda', or a torch.device"
        ) from error


def dtype_of(tensor: torch.Tensor) -> DType:
    """The piece dtype of a tensor; raises UnsupportedStateError for a quantized tensor."""
    try:
        return TORCH_DTYPES[tensor.dtype]
    except KeyError:
        raise UnsupportedStateError(f"tensors of {tensor.dtype} cannot be stored", next=_CONVERT) from None


def torch_dtype(dtype: DType) -> torch.dtype:
    """The inverse of `dtype_of`; raises UnsupportedStateError if this torch lacks the type."""
    try:
        return _TORCH_OF[dtype.name]
    except KeyError:
        raise UnsupportedStateError(
            f"this version of torch ({torch.__version__}) has no {dtype.name}", next="install a later torch"
        ) from None


def empty(
    dtype: DType,
    shape: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A new tensor with undefined elements; row-major unless `strides` (in elements) says otherwise."""
    own = torch_dtype(dtype)
    # Deterministic torch fills new memory, and raises for types that it cannot fill: those it has no arithmetic for.
    allocated = _CARRIERS.get(dtype.item_bytes, own) if dtype.as_bytes else own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32: "support is experimental"
        if strides is None:
            return torch.empty(tuple(shape), dtype=allocated, device=device).view(own)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=allocated, device=device).view(own)


def over(raw: np.ndarray, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over the bytes of `raw`, an array of uint8."""
    if not raw.size:
        return empty(dtype, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it may be read-only: callers that write check it
        return torch.from_numpy(raw).view(torch_dtype(dtype)).view(tuple(shape))


def of_buffer(memory: Any, length: int) -> torch.Tensor:
    """The first `length` bytes of a buffer as a tensor, which keeps `memory`, as views of it do."""
    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=length)


def viewed(data: torch.Tensor, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as elements of `dtype`, row-major in `shape`: the same memory."""
    return data.view(torch_dtype(dtype)).view(tuple(shape))


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of a dense tensor. The owner is its storage, which outlives `tensor.data = other`."""
    item_bytes = tensor.element_size()
    return Memory(
        tensor.untyped_storage(),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple([stride * item_bytes for stride in tensor.stride()]),
        item_bytes,
        "cpu" if tensor.is_cpu else str(tensor.device),
    )


class Columns(msgspec.Struct, frozen=True, eq=False):
    """Properties of tensors, one row each.

    address  of element (0, ..., 0)
    owners   keep the memory alive
    versions version counters, see `versions_of`; only with `hold`
    odd      positions of tensors whose elements are not one run of bytes in row-major order, or whose memory holds
             other values than they show (conjugate, negative); ascending
    device   number of each one's device among `devices`; -1: host memory. Empty if there are no devices
    """

    dtypes: Sequence[DType]
    shapes: Sequence[tuple[int, ...]]
    address: NDArray[np.uint64]
    owners: Sequence[object]
    versions: NDArray[np.int64]
    odd: Sequence[int]
    device: NDArray[np.int32]
    devices: tuple[str, ...]


def columns(tensors: Sequence[torch.Tensor], names: Sequence[str], *, hold: bool) -> Columns:
    """Examine each tensor once.

    hold    let storages own the memory, which outlive `tensor.data = other`, instead of tensors
    raises  UnsupportedStateError, by name, for a tensor that `check_tensor` refuses

    The checks of `check_tensor` are done more cheaply: a tensor that is sparse, opaque or nested has no address or no
    shape and raises; only complex tensors are conjugate; and without memory (meta and zero tensors, freed storages)
    the address is null, or the tensor's offset in its storage: so tensors at low addresses are checked one by one.
    """
    dtypes: list[DType] = []
    shapes: list[tuple[int, ...]] = []
    address = np.zeros(len(tensors), np.uint64)
    versions = np.zeros(len(tensors), np.int64)
    owners: list[object] = []
    odd: list[int] = []
    device = np.full(len(tensors), -1, np.int32)
    devices: dict[str, int] = {}
    read = _reader()
    try:
        for start in range(0, len(tensors), _BLOCK):
            block = list(tensors[start : start + _BLOCK])
            if not DENSE_TYPES.issuperset(map(type, block)):
                raise TypeError("a subclass")
            found, kinds, sizes, strided, is_complex, numbers, there = read(block) or _read_each(block)
            dtypes += kinds
            shapes += sizes
            owners.extend(map(torch.Tensor.untyped_storage, block) if hold else block)
            address[start : start + len(block)] = found
            if hold:  # here, while each tensor is cached: 0.2 ms of 1,800, and 0.6 in a pass of its own
                versions[start : start + len(block)] = versions_of(block)
            if is_complex or any(map(torch.Tensor.is_neg, block)):
                odd += [at for at, one in enumerate(block, start) if _is_odd(one)]
            else:
                odd += [start + at for at in strided]
            if there:
                numbers = np.array([*(devices.setdefault(one, len(devices)) for one in there), -1], np.int32)[numbers]
                device[start : start + len(block)] = numbers
            for at in np.flatnonzero(found < _LOW).tolist():
                check_tensor(block[at], names[start + at])
        return Columns(
            dtypes, shapes, address, owners, versions, odd, device if devices else device[:0], tuple(devices)
        )
    except (TypeError, KeyError, RuntimeError):
        for one, name in zip(tensors, names, strict=True):
            check_tensor(one, name)
        raise


_Read: TypeAlias = (
    "tuple[NDArray[np.uint64], list[DType], list[tuple[int, ...]], list[int], bool, NDArray[np.int32], Sequence[str]]"
)
"""Of a list of tensors: addresses, types, shapes, positions of those that are strided, whether one is complex; the
number of each one's device, -1 for the host, and the devices' names."""


def _reader() -> Callable[[list[torch.Tensor]], _Read | None]:
    """A function that reads tensors in one native pass, where this torch has DLPack's functions (2.10 on).

    It returns None for tensors that these do not describe. Of equal shapes one is kept: each tuple is an object for the
    garbage collector.
    """
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return _read_each
    reader = _native.TensorReader(exchange)
    for tensor, dtype in _samples(exchange):
        reader.name_type(tensor, dtype)

    def read(tensors: list[torch.Tensor]) -> _Read | None:
        found = reader.read(tensors)
        if found is None:
            return None
        address, dtypes, shapes, alike, odd, is_complex, numbers, firsts = found
        for at in alike:  # integers below a byte are integers of a byte to DLPack
            dtypes[at] = TORCH_DTYPES[tensors[at].dtype]
        return address, dtypes, shapes, odd, is_complex, numbers, [str(tensors[at].device) for at in firsts]

    return read


@cache
def _samples(exchange: object) -> tuple[tuple[torch.Tensor, DType | None], ...]:
    """A tensor of each type that DLPack knows, with the type as it is stored; None: it cannot be stored.

    All types of this torch are named, so that none passes for another one. If one cannot be made, there are no samples.
    """
    reader = _native.TensorReader(exchange)
    raw = torch.zeros(16, dtype=torch.uint8, device="cpu")  # deterministic torch cannot make each type anew
    try:
        all_types = [(raw.view(own), TORCH_DTYPES.get(own)) for own in _every_type()]
    except RuntimeError:
        return ()
    return tuple((tensor, dtype) for tensor, dtype in all_types if reader.name_type(tensor, dtype))


def _every_type() -> set[torch.dtype]:
    return {one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def _read_each(tensors: list[torch.Tensor]) -> _Read:
    """The same through torch's methods. Raises what these raise, and KeyError for a type that cannot be stored."""
    own = list(map(_dtype, tensors))
    found = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    sizes = list(map(torch.Tensor.size, tensors))
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes = list(map(distinct.setdefault, sizes, sizes))
    runs = list(map(torch.Tensor.is_contiguous, tensors))
    odd = [] if all(runs) else [at for at, is_run in enumerate(runs) if not is_run]
    devices: dict[torch.device, int] = {}
    numbers = np.full(len(tensors), -1, np.int32)
    if not all(map(_is_cpu, tensors)):
        own_device = map(_device, tensors)
        numbers[:] = [-1 if one.type == "cpu" else devices.setdefault(one, len(devices)) for one in own_device]
    names = list(map(str, devices))
    return found, [TORCH_DTYPES[dtype] for dtype in own], shapes, odd, not _COMPLEX.isdisjoint(own), numbers, names


def versions_of(tensors: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """The version counter of each tensor: torch counts the in-place operations on it and on all its views."""
    try:
        return np.fromiter(map(_version, tensors), np.int64, len(tensors))
    except RuntimeError:
        return np.array([_UNKNOWN if one.is_inference() else one._version for one in tensors], np.int64)


def _is_odd(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() or deferred(tensor)


def check_tensor(tensor: torch.Tensor, name: str) -> DType:
    """The dtype of a tensor whose elements are in memory, without overlap; else raises UnsupportedStateError."""
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if (
        type(tensor) in DENSE_TYPES
        and dtype is not None
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or tensor._is_zerotensor())
        and (tensor.untyped_storage().nbytes() or not tensor.numel())
    ):
        return dtype
    raise _refusal(tensor, name)


def _refusal(tensor: torch.Tensor, name: str) -> UnsupportedStateError:
    """The reason why `check_tensor` refuses, the most informative one first."""
    if uninitialized(tensor):
        return unsupported(name, tensor, "is not initialized", "run one forward pass before saving or loading")
    if type(tensor) not in DENSE_TYPES:
        return unsupported(name, tensor, "is a kind of tensor that cannot be stored", f"{_CONVERT}; {_TRAINABLE}")
    if tensor.is_meta:
        return unsupported(name, tensor, "is on the meta device, without memory", "give it memory with to_empty()")
    if tensor.is_nested or tensor.layout is not torch.strided:
        return unsupported(name, tensor, f"has layout {'nested' if tensor.is_nested else tensor.layout}", _CONVERT)
    if tensor.dtype not in TORCH_DTYPES:
        return unsupported(name, tensor, f"has dtype {tensor.dtype}", _CONVERT)
    return unsupported(name, tensor, "has no memory", "clone() it")


def uninitialized(tensor: torch.Tensor) -> bool:
    """Whether it is a lazy module's parameter or buffer, before the first forward."""
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; or a copy with the actual values, if conjugation or sign is only a flag."""
    return tensor.detach().resolve_conj().resolve_neg() if deferred(tensor) else tensor


def deferred(tensor: torch.Tensor) -> bool:
    """Whether the memory holds other values than the tensor shows: a conjugate or negative view."""
    return tensor.is_conj() or tensor.is_neg()


def check_array(array: np.ndarray, name: str) -> DType:
    """The dtype of a numpy array of plain native numbers; else raises UnsupportedStateError."""
    if type(array) in _ARRAY_TYPES and array.dtype.isnative and array.dtype.name in _NUMPY_NAMES:
        return DTYPES[array.dtype.name]
    if type(array) not in _ARRAY_TYPES:
        raise unsupported(name, array, "is a kind of array that cannot be stored", "convert it with numpy.asarray()")
    raise unsupported(
        name,
        array,
        f"has dtype {array.dtype.str}",
        "convert it with astype() to a native bool, integer, float16 to float64 or complex type, or to a list",
    )


def array_memory(array: np.ndarray) -> Memory:
    """The memory of an array; strides may be negative."""
    return Memory(array, array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


def ascending(array: np.ndarray) -> np.ndarray:
    """The array itself, or a copy if an axis runs backwards: memory is always read upwards."""
    return array.copy(order="C") if any(stride < 0 for stride in array.strides) else array


def writable(array: np.ndarray) -> np.ndarray | None:
    """The array; for a read-only view of memory that may be written, a view that may be; None for read-only memory."""
    if array.flags.writeable:
        return array
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:
        return None
    return view


def overlaps_itself(memory: Memory) -> bool:
    """Whether two elements may share bytes, so that writing one changes the other.

    Conservative: also True for interleavings that no common view makes.
    """
    if memory.contiguous:
        return False
    reach = memory.item_bytes  # bytes spanned by the dimensions so far
    for stride, length in sorted(zip(map(abs, memory.strides_bytes), memory.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False


def numpy_has(dtype: DType) -> bool:
    """Whether numpy has a dtype of that name."""
    return dtype.name in _NUMPY_NAMES
