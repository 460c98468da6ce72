"""Tensors as memory: the only module that examines the memory of torch tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from flowstone._native import TensorReader
from flowstone.errors import ArgumentError, UnsupportedStateError
from flowstone.format.objects import unsupported_error
from flowstone.state.memory import Columns
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.pieces import Memory

TORCH_DTYPES: Mapping[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)
}
_TORCH_OF: Mapping[str, torch.dtype] = {dtype.name: own for own, dtype in TORCH_DTYPES.items()}
DENSE_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensor types that are plain memory; subclasses may not be."""
NO_TENSOR = torch.empty(0)
"""Stands for memory that no tensor owns."""
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_CARRIERS = {1: torch.uint8, 2: torch.int16}  # element size -> dtype as which sub-byte and bits types are allocated
_LOW = np.uint64(1 << 40)  # a lower "address" may be an offset: memory has higher addresses, and storages are shorter
_dtype, _device, _is_cpu = attrgetter("dtype"), attrgetter("device"), attrgetter("is_cpu")
_version = attrgetter("_version")
_UNKNOWN = -1  # the version of inference tensors, which have no counter
_BLOCK = 256  # tensors examined at a time, so few that their Python objects stay in the CPU cache
_TRAINABLE = (
    "if frozen weights are quantised, save only the trained weights: {name: p for name, p in model.named_parameters() "
    "if p.requires_grad}, and the optimizer"
)
_CONVERT = "convert it to a dense tensor (to_dense(), dequantize(), full_tensor(), ...), or leave it out of the state"


def device_of(device: object) -> torch.device:
    """The torch device for a name such as "cuda:0", or for a device. Raises ArgumentError for anything else."""
    try:
        return torch.device(cast("str", device))
    except (RuntimeError, TypeError, UnicodeError) as error:
        raise ArgumentError(
            f"{device!r:.60} is not a device", found=f"{error!s:.200}", next="give 'cpu', 'cuda', or a torch.device"
        ) from error


def dtype_of(tensor: torch.Tensor) -> DType:
    """The dtype of a tensor, as a DType. Raises UnsupportedStateError for a quantized tensor."""
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
    # In deterministic mode torch fills new memory. It cannot fill types without arithmetic, and raises for them.
    allocated = _CARRIERS.get(dtype.item_bytes, own) if dtype.as_bytes else own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that its support of complex32 is experimental
        if strides is None:
            return torch.empty(tuple(shape), dtype=allocated, device=device).view(own)
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=allocated, device=device).view(own)


def tensor_over(raw: np.ndarray, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over the bytes of `raw`, an array of uint8."""
    if not raw.size:
        return empty(dtype, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of read-only arrays; callers that write check that
        return torch.from_numpy(raw).view(torch_dtype(dtype)).view(tuple(shape))


def of_buffer(memory: Any, length: int) -> torch.Tensor:
    """The first `length` bytes of a buffer as a tensor, which keeps `memory` alive."""
    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=length)


def view_as(data: torch.Tensor, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of bytes `data`, viewed as elements of `dtype` in row-major order and `shape`. Copies nothing."""
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


def columns(tensors: Sequence[torch.Tensor], names: Sequence[str], *, hold: bool) -> Columns:
    """Find the memory of each tensor, in one pass.

    hold    whether the storages of the tensors are kept alive, instead of the tensors; storages survive
            `tensor.data = other`
    raises  UnsupportedStateError, by name, for a tensor that `check_tensor` refuses

    `check_tensor` is called only for tensors that it may refuse, which saves time. A sparse, opaque or nested tensor
    raises by itself, because it has no address or no shape. Tensors without memory (meta tensors, torch's ZeroTensor,
    freed storages) have the address 0, or their offset in the storage, so each tensor at a low address is checked. The
    conjugate bit, which only complex tensors can have, is looked up only if some tensor is complex.
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
                raise TypeError("tensors of subclasses of torch.Tensor are not supported: pass plain tensors")
            addresses, kinds, sizes, strided, is_complex, numbers, there = read(block) or _read_each(block)
            dtypes += kinds
            shapes += sizes
            owners.extend(map(torch.Tensor.untyped_storage, block) if hold else block)
            address[start : start + len(block)] = addresses
            if hold:  # takes 0.2 ms for 1,800 tensors while each is in the CPU cache; a separate pass takes 0.6 ms
                versions[start : start + len(block)] = versions_of(block)
            if is_complex or any(map(torch.Tensor.is_neg, block)):
                odd += [row for row, tensor in enumerate(block, start) if _is_odd(tensor)]
            else:
                odd += [start + row for row in strided]
            if there:
                numbers = np.array([*(devices.setdefault(name, len(devices)) for name in there), -1], np.int32)[numbers]
                device[start : start + len(block)] = numbers
            for row in np.flatnonzero(addresses < _LOW).tolist():
                check_tensor(block[row], names[start + row])
        return Columns(
            dtypes, shapes, address, owners, versions, odd, device if devices else device[:0], tuple(devices)
        )
    except (TypeError, KeyError, RuntimeError):
        for tensor, name in zip(tensors, names, strict=True):
            check_tensor(tensor, name)
        raise


_Read: TypeAlias = (
    "tuple[NDArray[np.uint64], list[DType], list[tuple[int, ...]], list[int], bool, NDArray[np.int32], Sequence[str]]"
)
"""For a list of tensors: addresses, types, shapes, positions of strided tensors, whether one is complex; the index of
each tensor's device, -1 for the host, and the devices' names.
"""


def _reader() -> Callable[[list[torch.Tensor]], _Read | None]:
    """A function that reads tensors in one native pass; None if this torch lacks DLPack's functions (before 2.10).

    The returned function returns None for tensors that DLPack does not describe. Equal shapes share one tuple, as each
    tuple costs the garbage collector time.
    """
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return _read_each
    reader = TensorReader(exchange)
    for tensor, dtype in _samples(exchange):
        reader.name_type(tensor, dtype)

    def read(tensors: list[torch.Tensor]) -> _Read | None:
        columns = reader.read(tensors)
        if columns is None:
            return None
        address, dtypes, shapes, alike, odd, is_complex, numbers, firsts = columns
        for row in alike:  # DLPack describes integers below a byte as integers of a byte
            dtypes[row] = TORCH_DTYPES[tensors[row].dtype]
        return address, dtypes, shapes, odd, is_complex, numbers, [str(tensors[row].device) for row in firsts]

    return read


@cache
def _samples(exchange: object) -> tuple[tuple[torch.Tensor, DType | None], ...]:
    """For each dtype of this torch that DLPack can describe: a tensor, and the DType in which such a tensor is stored;
    None: it cannot be stored.

    Dtypes that cannot be stored are included, so that none of them is mistaken for one that can. If torch cannot create
    one of the tensors, the result is an empty tuple.
    """
    reader = TensorReader(exchange)
    raw = torch.zeros(16, dtype=torch.uint8, device="cpu")  # in deterministic mode torch cannot allocate each dtype
    try:
        all_types = [(raw.view(own), TORCH_DTYPES.get(own)) for own in _every_type()]
    except RuntimeError:
        return ()
    return tuple((tensor, dtype) for tensor, dtype in all_types if reader.name_type(tensor, dtype))


def _every_type() -> set[torch.dtype]:
    return {own for own in vars(torch).values() if isinstance(own, torch.dtype)}


def _read_each(tensors: list[torch.Tensor]) -> _Read:
    """Get addresses, dtypes, shapes and so on (see _Read) through torch's methods. Raises the errors of these methods,
    and KeyError for a dtype that cannot be stored.
    """
    own = list(map(_dtype, tensors))
    addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    sizes = list(map(torch.Tensor.size, tensors))
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes = list(map(distinct.setdefault, sizes, sizes))
    runs = list(map(torch.Tensor.is_contiguous, tensors))
    odd = [] if all(runs) else [row for row, is_run in enumerate(runs) if not is_run]
    devices: dict[torch.device, int] = {}
    numbers = np.full(len(tensors), -1, np.int32)
    if not all(map(_is_cpu, tensors)):
        own_device = map(_device, tensors)
        numbers[:] = [-1 if device.type == "cpu" else devices.setdefault(device, len(devices)) for device in own_device]
    names = list(map(str, devices))
    return addresses, [TORCH_DTYPES[dtype] for dtype in own], shapes, odd, not _COMPLEX.isdisjoint(own), numbers, names


def versions_of(tensors: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """The version counter of each tensor: torch counts the in-place operations on it and on all its views."""
    try:
        return np.fromiter(map(_version, tensors), np.int64, len(tensors))
    except RuntimeError:
        return np.array([_UNKNOWN if tensor.is_inference() else tensor._version for tensor in tensors], np.int64)


def _is_odd(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() or is_deferred(tensor)


def check_tensor(tensor: torch.Tensor, name: str) -> DType:
    """The dtype of a dense tensor in memory. Raises UnsupportedStateError for any other tensor."""
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
    """The error of `check_tensor`: of several reasons to refuse the tensor, the most informative one."""
    if is_uninitialized(tensor):
        return unsupported_error(name, tensor, "is not initialized", "run one forward pass before saving or loading")
    if type(tensor) not in DENSE_TYPES:
        return unsupported_error(name, tensor, "is a kind of tensor that cannot be stored", f"{_CONVERT}; {_TRAINABLE}")
    if tensor.is_meta:
        return unsupported_error(
            name, tensor, "is on the meta device, without memory", "give it memory with to_empty()"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        return unsupported_error(
            name, tensor, f"has layout {'nested' if tensor.is_nested else tensor.layout}", _CONVERT
        )
    if tensor.dtype not in TORCH_DTYPES:
        return unsupported_error(name, tensor, f"has dtype {tensor.dtype}", _CONVERT)
    return unsupported_error(name, tensor, "has no memory", "clone() it")


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or buffer of a lazy module (torch.nn.Lazy...) before its first forward."""
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; or, if it has a conjugate or negative bit, a copy with the actual values."""
    return tensor.detach().resolve_conj().resolve_neg() if is_deferred(tensor) else tensor


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a conjugate or negative bit, so that its memory has other values than it shows."""
    return tensor.is_conj() or tensor.is_neg()
