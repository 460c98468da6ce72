"""Replays of optimizer steps: the same optimizers step again, on the gradients and settings that a journal holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch

from flowstone.errors import DamagedError, FlowstoneError
from flowstone.format import objects
from flowstone.format.journal import ActRow, CompressedRow, StepRow, TensorRow
from flowstone.state.compressed import CompressedBucket, CompressedGradients, gradient_in
from flowstone.state.shards import is_dtensor
from flowstone.state.stepped import addresses_of, local, stepped_parameters
from flowstone.state.tensors import torch_dtype
from flowstone.table.dtype import DTYPES

_PADDED_MAX = 2  # elements of all buckets of an act, of those of the parameters: what pads them is no gradient


class Borrowed(msgspec.Struct, frozen=True, eq=False):
    """What other ranks have logged of an act of this one.

    gradients  the parameter's position; the tensor, and the payload that it is in
    buckets    with this rank's numbers; the tensors of the frame that it is in, and the payload
    """

    gradients: Mapping[int, tuple[TensorRow, memoryview]] = {}
    buckets: Sequence[tuple[CompressedRow, Sequence[TensorRow], memoryview]] = ()


class Replayer:
    """Steps the optimizers of a state. The state must be that of the step before.

    sources  of compressed gradients, as the journal numbers them whose steps come next
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.sources: Sequence[CompressedGradients] = ()
        self._parameters = [stepped_parameters(one) for one in optimizers]

    def addresses(self) -> list[int]:
        """Where that lies what its steps change. A step may make tensors, and replace them."""
        return addresses_of(self._optimizers)

    @contextmanager
    def stepping(self, threads: int) -> Iterator[None]:
        """While inside, steps are made with as many threads as they were, and torch's generator is theirs.

        A kernel's last elements may be computed otherwise than those before, and threads divide a tensor.
        """
        generator, had = torch.get_rng_state(), torch.get_num_threads()
        gradients = [[parameter.grad for parameter in of] for of in self._parameters]
        torch.set_num_threads(min(threads, 1024))
        try:
            yield
        finally:
            torch.set_num_threads(had)
            torch.set_rng_state(generator)
            for of, own in zip(self._parameters, gradients, strict=True):
                for parameter, gradient in zip(of, own, strict=True):
                    parameter.grad = gradient

    def apply(self, row: StepRow, payload: memoryview, path: str, borrowed: Sequence[Borrowed] = ()) -> None:
        """Make a step's acts, in order. `payload` is read, and written by optimizers that change gradients.

        borrowed  for each act, the gradients that are in other ranks' files; () if none are
        raises  DamagedError if they do not fit the optimizers; acts before may have been made
        """
        for turn, act in enumerate(row.acts):
            if not 0 <= act.optimizer < len(self._optimizers):
                raise _unfit(path, f"optimizer {act.optimizer}", f"{len(self._optimizers)} optimizers")
            try:
                others = borrowed[turn] if borrowed else Borrowed()
                own = {at: (row.tensors[number], payload) for at, number in act.gradients}
                buckets = [(one, row.tensors, payload) for one in act.compressed]
                given = Borrowed({**others.gradients, **own}, [*others.buckets, *buckets])
                self._act(act, given, row.tensors, payload, path)
            except (FlowstoneError, MemoryError):
                raise
            except Exception as error:  # what a file says reaches torch: sizes, settings, a generator's state
                raise _unfit(path, f"{type(error).__name__}: {error!s:.300}", "what its steps can take") from error

    def _act(
        self, act: ActRow, given: Borrowed, tensors: Sequence[TensorRow], payload: memoryview, path: str
    ) -> None:
        optimizer, parameters = self._optimizers[act.optimizer], self._parameters[act.optimizer]
        found: dict[int, torch.Tensor] = {}
        for at, (tensor, place) in given.gradients.items():
            if not 0 <= at < len(parameters):
                raise _unfit(path, f"parameter {at}", f"{len(parameters)} parameters")
            found[at] = _gradient(parameters[at], tensor, place, path)
        decompressed, possible = sum(one.length for one, _, _ in given.buckets), sum(one.numel() for one in parameters)
        if decompressed > _PADDED_MAX * possible:
            raise _unfit(path, f"buckets of {decompressed} elements", f"gradients of {possible}")
        buckets = [(one.source, self._decompress(one, rows, place, parameters, found, path))
                   for one, rows, place in given.buckets]
        if act.options is not None:
            self._set_options(optimizer, act, path)
        if act.generator is not None:
            torch.set_rng_state(_tensor(tensors[act.generator], payload).clone())
        for at, parameter in enumerate(parameters):
            parameter.grad = found.get(at)
        scaled = {"grad_scale": act.grad_scale, "found_inf": act.found_inf}
        device = local(parameters[0]).device if parameters else "cpu"
        for name, number_of in scaled.items():
            if number_of is not None:
                setattr(optimizer, name, torch.full((), number_of, dtype=torch.float32, device=device))
        try:
            # The method of the class, below the function that calls hooks: those of the user are for training.
            step = type(optimizer).step
            getattr(step, "__wrapped__", step)(optimizer)
        finally:
            for name, number_of in scaled.items():
                if number_of is not None:
                    delattr(optimizer, name)
        for source, bucket in buckets:
            if not self.sources[source].exact:
                self.sources[source].replayed(bucket)

    def _decompress(
        self, row: CompressedRow, tensors: Sequence[TensorRow], payload: memoryview,
        parameters: Sequence[torch.Tensor], found: dict[int, torch.Tensor], path: str,
    ) -> CompressedBucket:
        """Add the gradients of a bucket to `found`."""
        members = [(parameters[at], offset) for at, offset in row.parameters if at < len(parameters)]
        reach = max((one.numel() + offset for one, offset in members), default=0)
        possible = row.source < len(self.sources) and members and len(members) == len(row.parameters)
        if not possible or not reach <= row.length <= sum(one.numel() for one in parameters):
            raise _unfit(path, f"a bucket of {row.length} elements", "one of this optimizer's parameters")
        device = members[0][0].device
        content = {name: _tensor(tensors[at], payload).to(device) for name, at in row.tensors.items()}
        flat = self.sources[row.source].decompress(content, row.length)
        if flat.shape != (row.length,):
            raise _unfit(path, f"a bucket that decompresses to {tuple(flat.shape)}", f"{row.length} elements")
        flat = flat if row.scale is None else flat * row.scale
        for (at, _), (parameter, offset) in zip(row.parameters, members, strict=True):
            found[at] = gradient_in(flat, parameter, offset)
        return CompressedBucket([one for one, _ in members], [at for _, at in members], row.length, content)

    def _set_options(self, optimizer: torch.optim.Optimizer, act: ActRow, path: str) -> None:
        groups = optimizer.param_groups
        assert act.options is not None, "the caller has looked"
        if len(act.options) != len(groups):
            raise _unfit(path, f"{len(act.options)} groups", f"{len(groups)} groups")
        for i, (group, text) in enumerate(zip(groups, act.options, strict=True)):
            options = objects.decode_text(text, f"{path}: param_groups.{i}")
            if not isinstance(options, dict) or any(key not in group for key in options):
                raise _unfit(path, "settings that the optimizer does not have", "its own")
            for key, value in options.items():
                group[key] = _set(group[key], value)


def _set(own: object, value: object) -> object:
    """A setting with the numbers of `value`: tensors keep their memory, also those in a tuple or a list."""
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            return own.fill_(cast("float", value))
    if isinstance(own, tuple | list) and type(own) is type(value) and len(own) == len(cast("Any", value)):
        return cast("Any", type(own))(map(_set, own, cast("Any", value)))
    return value


def _tensor(row: TensorRow, payload: memoryview) -> torch.Tensor:
    dtype = torch_dtype(DTYPES[row.dtype])
    if not row.bytes:
        return torch.empty(row.shape, dtype=dtype)
    flat = torch.frombuffer(payload[row.offset : row.offset + row.bytes], dtype=torch.uint8).view(dtype)
    return flat.view(row.shape) if row.stride is None else flat.as_strided(row.shape, row.stride)


def _gradient(parameter: torch.Tensor, row: TensorRow, payload: memoryview, path: str) -> torch.Tensor:
    own = local(parameter)
    if tuple(own.shape) != row.shape:
        raise _unfit(path, f"a gradient of shape {row.shape}", f"shape {tuple(own.shape)}")
    gradient = _tensor(row, payload).to(own.device)
    if not is_dtensor(parameter):
        return gradient
    like = cast("Any", parameter)
    return cast("torch.Tensor", type(like).from_local(
        gradient, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ))


def _unfit(path: str, found: str, expected: str) -> DamagedError:
    return DamagedError(
        f"{path} does not fit the optimizers of this state", expected=expected, found=found,
        next="load the checkpoint that it begins with: load(step=...)",
    )
