"""A provider session: a provider's description of one object, and its chunks, each checked as it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import numpy as np
import torch

from flowstone.config import NDIM_MAX
from flowstone.errors import ProviderError, StateError
from flowstone.state import tensors
from flowstone.state.names import Place, valid_name
from flowstone.state.provider import AnyPart, ObjectPart, Part
from flowstone.state.providers import Served
from flowstone.state.records import MISSING
from flowstone.state.split import type_name
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES

_Result = TypeVar("_Result")


@dataclass(slots=True)
class ProviderSession:
    """An object's description, and its chunks, taken one after the other.

    parts, objects  the provider's description, checked
    split           full names of tensors that lie in several boxes
    """

    served: Served
    value: object
    place: Place
    parts: list[Part] = field(default_factory=list)
    objects: list[ObjectPart] = field(default_factory=list)
    split: set[str] = field(default_factory=set)
    _places: dict[str, Place] = field(default_factory=dict)
    _chunks: Iterator[object] | None = None

    def __post_init__(self) -> None:
        provider = self.served.provider
        described = self.called("describe", lambda: list(provider.describe(self.value)))
        first: dict[str, list[Part]] = {}
        for part in described:
            if not isinstance(part, (Part, ObjectPart)):
                self.refuse("describes what is not a part", "Part or ObjectPart", repr(part)[:80],
                            "correct its describe()")
            _check_name(self, part.name)
            if isinstance(part, ObjectPart):
                self.objects.append(part)
                continue
            if self.objects:
                self.refuse(f"describes the tensor '{part.name}' after an object", "Parts, then ObjectParts",
                            self.objects[-1].name, "describe all tensors first, then the objects")
            _check_part(self, part)
            self.parts.append(part)
            first.setdefault(part.name, []).append(part)
        _check_names(self, first)
        self._keep_promises({**{part.name: part for part in self.parts}, **{one.name: one for one in self.objects}})
        self.split = {f"{self.place.name}.{name}" for name, boxes in first.items() if len(boxes) > 1}

    def _keep_promises(self, parts: Mapping[str, AnyPart]) -> None:
        before = self.served.promises.before(self.value)
        for name, known in before.items():
            part = parts.get(name)
            if part is None or _promise(part) != _promise(known):
                self.refuse(
                    f"describes '{name}' differently than before", _words(known),
                    "nothing of that name" if part is None else _words(part),
                    "describe an object the same way as long as it lives; only lengths may change, with resizable=True",
                )
        self.served.promises.note(self.value, parts)

    def place_of(self, part: AnyPart) -> Place:
        """The place of a part: all boxes of a tensor have the same."""
        inner = self._places.get(part.name)
        if inner is None:
            inner = self._places[part.name] = self.place.called(f"{self.place.name}.{part.name}", part.name)
        return inner

    def memory(self, *, writable: bool = False) -> Iterator[tuple[Part, torch.Tensor | np.ndarray]]:
        """Each part with its memory, checked against the description; `writable` if bytes are to be written into it."""
        chunks = self.called("chunks", lambda: iter(self.served.provider.chunks(self.value)))
        self._chunks = chunks
        for at, part in enumerate(self.parts):
            yield part, _as_described(self, part, self._next(at), writable and not part.resizable)

    def values(self) -> Iterator[tuple[ObjectPart, object]]:
        """Each small object with its value; after `memory`."""
        for at, part in enumerate(self.objects, len(self.parts)):
            yield part, self._next(at)

    def _next(self, at: int) -> object:
        assert self._chunks is not None, "chunks are taken in order"
        chunks = self._chunks
        chunk = self.called("chunks", lambda: next(chunks, MISSING))
        if chunk is MISSING:
            described = len(self.parts) + len(self.objects)
            self.refuse("gives too few chunks", f"{described}, one for each part", str(at), "correct its chunks()")
        return chunk

    def end(self) -> None:
        """Check that no chunk is left."""
        assert self._chunks is not None, "chunks are taken in order"
        chunks = self._chunks
        if self.called("chunks", lambda: next(chunks, MISSING)) is not MISSING:
            described = len(self.parts) + len(self.objects)
            self.refuse("gives too many chunks", f"{described}, one for each part", "more", "correct its chunks()")

    def close(self) -> None:
        """Close the generator."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            self.called("chunks", close)

    def called(self, method: str, call: Callable[[], _Result]) -> _Result:
        """The result of the provider's code; an exception in it becomes an error that names the provider."""
        try:
            return call()
        except Exception as error:
            raise ProviderError(
                f"cannot describe '{self.place.name}'", provider=self.served.title,
                found=f"its {method}() raised {type(error).__name__}: {error}",
                next=f"fix that {method}(), or leave the object out of the state",
            ) from error

    def checked(self, what: str, call: Callable[[object, Place], object], value: object, inner: Place) -> object:
        """A small object in the form that the state layer stores."""
        try:
            return call(value, inner)
        except StateError as error:
            found = f"{error.message}: {error.facts.get('found', 'see the cause')}"
            remedy = "let chunks() give plain values; for a split tensor derive SplitTensor, and change context_of()"
            self.refuse(what, "plain values, without tensors", found, remedy, error)

    def refuse(
        self, what: str, expected: str, found: str, remedy: str, error: Exception | None = None
    ) -> NoReturn:
        raise ProviderError(
            f"the provider of '{self.place.name}' {what}", provider=self.served.title,
            type=type_name(type(self.value)), expected=expected, found=found, next=remedy,
        ) from error


def _check_name(session: ProviderSession, name: object) -> None:
    if type(name) is not str or not valid_name(name) or not all(name.split(".")):
        session.refuse(f"describes a part named {name!r}", "dotted components, none empty, UTF-8 without NUL",
        repr(name),
                     "rename the part")


def _check_part(session: ProviderSession, part: Part) -> None:
    title = f"describes the tensor '{part.name}' wrongly"
    if part.dtype not in DTYPES:
        session.refuse(title, "a dtype of docs/FORMAT.md, such as 'float32'", repr(part.dtype), "correct its dtype")
    shape = part.shape
    if not isinstance(shape, tuple) or len(shape) > NDIM_MAX or any(type(n) is not int or n < 0 for n in shape):
        session.refuse(title, f"a tuple of at most {NDIM_MAX} lengths from 0", f"shape {shape!r}", "correct its shape")
    if part.box is not None and not part.box.inside(shape):
        session.refuse(title, f"a box inside shape {shape}", f"box {part.box}", "correct its box")


def _check_names(session: ProviderSession, parts: Mapping[str, list[Part]]) -> None:
    """Check that names are distinct; parts of the same name must be boxes that do not overlap."""
    names = set(parts)
    for one in session.objects:
        if one.name in names:
            session.refuse(f"gives two parts the name '{one.name}'", "a name for each", "the same", "rename one")
        names.add(one.name)
    for name, boxes in parts.items():
        if len(boxes) == 1:
            continue
        if len({(part.dtype, part.shape, part.lazy, part.resizable) for part in boxes}) > 1:
            session.refuse(f"describes boxes of '{name}' that differ", "one dtype, one shape, the same flags",
                         " and ".join(sorted({_words(part) for part in boxes})), "rename one, or correct them")
        overlap = _overlap([part.box or Box.whole(part.shape) for part in boxes])
        if overlap is not None:
            session.refuse(f"describes boxes of '{name}' that overlap", "each element once",
                         f"{overlap[0]} and {overlap[1]}", "correct the boxes, or rename one part")


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap. Compared along the first dimension, where blocks usually follow each other."""
    ordered = sorted(boxes, key=lambda box: box.offset)
    for at, box in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if box == other or box.intersect(other) is not None:
                return box, other
            if box.offset and other.offset[0] >= box.end[0]:
                break
    return None


def _promise(part: AnyPart) -> object:
    """The items of a part's description that may not change while the object lives."""
    if isinstance(part, ObjectPart):
        return part.constant
    return part.dtype, len(part.shape) if part.resizable else part.shape, part.lazy, part.resizable


def _words(part: AnyPart) -> str:
    if isinstance(part, ObjectPart):
        return "a constant object" if part.constant else "an object"
    return f"{part.dtype} {part.shape}{', lazy' * part.lazy}{', resizable' * part.resizable}"


def _as_described(session: ProviderSession, part: Part, chunk: object, writable: bool) -> torch.Tensor | np.ndarray:
    """A chunk as a tensor or an array, checked for the described dtype and shape."""
    shape = part.shape if part.box is None else part.box.shape
    expected = f"{part.dtype} {shape}"
    if isinstance(chunk, torch.Tensor):
        if type(chunk) not in tensors.DENSE_TYPES:
            session.refuse(f"gives a tensor for '{part.name}' that is not plain memory", "a plain tensor",
                         type_name(type(chunk)), "describe and give the tensors inside of it")
    elif not isinstance(chunk, np.ndarray):
        return _of_buffer(session, part, shape, chunk, writable)
    found = f"{str(chunk.dtype).removeprefix('torch.')} {tuple(chunk.shape)}"
    if found != expected:
        session.refuse(f"gives a chunk for '{part.name}' that differs from its description", expected, found,
                     "make describe() and chunks() agree")
    if writable and isinstance(chunk, np.ndarray) and not chunk.flags.writeable:
        _refuse_read_only(session, part, chunk)
    return chunk


def _refuse_read_only(session: ProviderSession, part: Part, chunk: object) -> NoReturn:
    session.refuse(f"gives read-only memory for '{part.name}'", "writable memory",
                 f"a read-only {type_name(type(chunk))}", "give a writable buffer, or describe it as resizable")


def _of_buffer(
    session: ProviderSession, part: Part, shape: tuple[int, ...], chunk: object, writable: bool
) -> torch.Tensor | np.ndarray:
    """Memory with the buffer protocol, viewed as the part describes it."""
    try:
        view = memoryview(chunk)  # type: ignore[arg-type]
        if not view.c_contiguous:
            raise BufferError("not contiguous")
    except (TypeError, BufferError) as error:
        session.refuse(f"gives a chunk for '{part.name}' that is not memory", "a tensor, array or contiguous buffer",
                     f"{type_name(type(chunk))} ({error})", "describe it as an ObjectPart, or give its memory", error)
    bytes_described = Box.whole(shape).elements * DTYPES[part.dtype].item_bytes
    if view.nbytes != bytes_described:
        session.refuse(f"gives a chunk for '{part.name}' that differs from its description", f"{bytes_described} bytes",
                     f"{view.nbytes} bytes", "make describe() and chunks() agree")
    if writable and view.readonly:
        _refuse_read_only(session, part, chunk)
    raw = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if tensors.numpy_has(DTYPES[part.dtype]):
        return raw.view(part.dtype).reshape(shape)
    return tensors.over(raw, DTYPES[part.dtype], shape)
