"""A provider session: gets the description of one object, and the memory of its parts, from a provider, and checks
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from flowstone.config import NDIM_MAX
from flowstone.errors import ProviderError, StateError
from flowstone.providers.provider import AnyPart, ObjectPart, Part
from flowstone.state.framework import FRAMEWORK
from flowstone.state.memory import numpy_has
from flowstone.state.names import Place, type_name, valid_name
from flowstone.state.provider_registry import ProviderEntry
from flowstone.state.records import MISSING
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES

_Result = TypeVar("_Result")


class ProviderSession(msgspec.Struct, eq=False):
    """A provider's description of an object, and its iterator over the memory and values of the parts.

    parts, objects  the provider's description, checked
    split           full names of tensors that have several boxes
    """

    entry: ProviderEntry
    value: object
    place: Place
    parts: list[Part] = msgspec.field(default_factory=list)
    objects: list[ObjectPart] = msgspec.field(default_factory=list)
    split: set[str] = msgspec.field(default_factory=set)
    _places: dict[str, Place] = msgspec.field(default_factory=dict)
    _chunks: Iterator[object] | None = None

    def __post_init__(self) -> None:
        provider = self.entry.provider
        described = self.call("describe", lambda: list(provider.describe(self.value)))
        first: dict[str, list[Part]] = {}
        for part in described:
            if not isinstance(part, (Part, ObjectPart)):
                self.refuse(
                    "describes something that is not a part", "Part or ObjectPart", repr(part)[:80],
                    "correct its describe()"
                )
            _check_name(self, part.name)
            if isinstance(part, ObjectPart):
                self.objects.append(part)
                continue
            if self.objects:
                self.refuse(
                    f"describes the tensor '{part.name}' after an object", "Parts, then ObjectParts",
                    self.objects[-1].name, "describe all tensors first, then the objects"
                )
            _check_part(self, part)
            self.parts.append(part)
            first.setdefault(part.name, []).append(part)
        _check_names(self, first)
        self._keep_promises({**{part.name: part for part in self.parts}, **{part.name: part for part in self.objects}})
        self.split = {f"{self.place.name}.{name}" for name, boxes in first.items() if len(boxes) > 1}

    def _keep_promises(self, parts: Mapping[str, AnyPart]) -> None:
        before = self.entry.history.last_parts(self.value)
        for name, earlier in before.items():
            part = parts.get(name)
            if part is None or _promise(part) != _promise(earlier):
                self.refuse(
                    f"describes '{name}' differently than before", _words(earlier),
                    "nothing of that name" if part is None else _words(part),
                    "describe an object the same way as long as it lives; only lengths may change, with resizable=True",
                )
        self.entry.history.record(self.value, parts)

    def place_of(self, part: AnyPart) -> Place:
        """The path of a part in the state, under which it is stored. Parts that are boxes of one tensor have the same
        path.
        """
        inner = self._places.get(part.name)
        if inner is None:
            inner = self._places[part.name] = self.place.called(f"{self.place.name}.{part.name}", part.name)
        return inner

    def iterate_chunks(self, *, writable: bool = False) -> Iterator[tuple[Part, Any]]:
        """Yield each part with its memory, which is checked against the description. `writable`: whether the memory
        must be writable, for a load.
        """
        chunks = self.call("chunks", lambda: iter(self.entry.provider.chunks(self.value)))
        self._chunks = chunks
        for number, part in enumerate(self.parts):
            yield part, _as_described(self, part, self._next(number), writable and not part.resizable)

    def iterate_objects(self) -> Iterator[tuple[ObjectPart, object]]:
        """Yield each small object (ObjectPart) with its value. Must be called after `iterate_chunks` has ended."""
        for number, part in enumerate(self.objects, len(self.parts)):
            yield part, self._next(number)

    def _next(self, number: int) -> object:
        assert self._chunks is not None, "chunks are taken in order"
        chunks = self._chunks
        chunk = self.call("chunks", lambda: next(chunks, MISSING))
        if chunk is MISSING:
            described = len(self.parts) + len(self.objects)
            self.refuse("gives too few chunks", f"{described}, one for each part", str(number), "correct its chunks()")
        return chunk

    def check_exhausted(self) -> None:
        """Check that the provider's `chunks` yields no further item."""
        assert self._chunks is not None, "chunks are taken in order"
        chunks = self._chunks
        if self.call("chunks", lambda: next(chunks, MISSING)) is not MISSING:
            described = len(self.parts) + len(self.objects)
            self.refuse("gives too many chunks", f"{described}, one for each part", "more", "correct its chunks()")

    def close(self) -> None:
        """Close the provider's generator of chunks."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            self.call("chunks", close)

    def call(self, method: str, call: Callable[[], _Result]) -> _Result:
        """The result of `call`, which runs the provider's `method`. If the provider raises, raises an error that names
        the provider.
        """
        try:
            return call()
        except Exception as error:
            raise ProviderError(
                f"cannot describe '{self.place.name}'", provider=self.entry.title,
                found=f"its {method}() raised {type(error).__name__}: {error}",
                next=f"fix that {method}(), or leave the object out of the state",
            ) from error

    def check_object(self, fault: str, call: Callable[[object, Place], object], value: object, inner: Place) -> object:
        """A small object, converted by `call` into the form in which it is stored. Raises ProviderError with the text
        `fault` if it cannot be stored.
        """
        try:
            return call(value, inner)
        except StateError as error:
            actual = f"{error.message}: {error.facts.get('found', 'see the cause')}"
            remedy = (
                "let chunks() give plain values; for a tensor subclass, register a subclass of SplitTensor whose "
                "context_of() gives plain values"
            )
            self.refuse(fault, "plain values, without tensors", actual, remedy, error)

    def refuse(
        self, problem: str, expected: str, actual: str, remedy: str, error: Exception | None = None
    ) -> NoReturn:
        raise ProviderError(
            f"the provider of '{self.place.name}' {problem}", provider=self.entry.title,
            type=type_name(type(self.value)), expected=expected, found=actual, next=remedy,
        ) from error


def _check_name(session: ProviderSession, name: object) -> None:
    if type(name) is not str or not valid_name(name) or not all(name.split(".")):
        session.refuse(
            f"describes a part named {name!r}", "dotted components, none empty, UTF-8 without NUL", repr(name),
            "rename the part"
        )


def _check_part(session: ProviderSession, part: Part) -> None:
    title = f"describes the tensor '{part.name}' wrongly"
    if part.dtype not in DTYPES:
        session.refuse(title, "a dtype of docs/FORMAT.md, such as 'float32'", repr(part.dtype), "correct its dtype")
    shape = part.shape
    if not isinstance(shape, tuple) or len(shape) > NDIM_MAX or any(type(n) is not int or n < 0 for n in shape):
        session.refuse(
            title, f"a tuple of at most {NDIM_MAX} lengths of at least 0", f"shape {shape!r}", "correct its shape"
        )
    if part.box is not None and not part.box.inside(shape):
        session.refuse(title, f"a box inside shape {shape}", f"box {part.box}", "correct its box")


def _check_names(session: ProviderSession, parts: Mapping[str, list[Part]]) -> None:
    """Check that names are distinct; parts of the same name must be boxes that do not overlap."""
    names = set(parts)
    for item in session.objects:
        if item.name in names:
            session.refuse(
                f"gives two parts the name '{item.name}'", "a name of its own for each", "the same name", "rename one"
            )
        names.add(item.name)
    for name, boxes in parts.items():
        if len(boxes) == 1:
            continue
        if len({(part.dtype, part.shape, part.lazy, part.resizable) for part in boxes}) > 1:
            session.refuse(
                f"describes boxes of '{name}' that differ", "one dtype, one shape, the same flags",
                " and ".join(sorted({_words(part) for part in boxes})), "rename one of these parts, or correct them",
            )
        overlap = _overlap([part.box or Box.whole(part.shape) for part in boxes])
        if overlap is not None:
            session.refuse(
                f"describes boxes of '{name}' that overlap", "boxes that do not overlap",
                f"{overlap[0]} and {overlap[1]}", "correct the boxes, or rename one part",
            )


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that overlap, or None. Boxes are sorted along the first dimension, as blocks usually follow each
    other there.
    """
    ordered = sorted(boxes, key=lambda box: box.offset)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box == other or box.intersect(other) is not None:
                return box, other
            if box.offset and other.offset[0] >= box.end[0]:
                break
    return None


def _promise(part: AnyPart) -> object:
    """The properties of a part that must not change while the object lives."""
    if isinstance(part, ObjectPart):
        return part.constant
    return part.dtype, len(part.shape) if part.resizable else part.shape, part.lazy, part.resizable


def _words(part: AnyPart) -> str:
    if isinstance(part, ObjectPart):
        return "a constant object" if part.constant else "an object"
    return f"{part.dtype} {part.shape}{', lazy' * part.lazy}{', resizable' * part.resizable}"


def _as_described(session: ProviderSession, part: Part, chunk: Any, writable: bool) -> Any:
    """The memory of a part, as a tensor or an array. Raises unless it has the described dtype and shape."""
    shape = part.shape if part.box is None else part.box.shape
    expected = f"{part.dtype} {shape}"
    if FRAMEWORK.is_tensor(chunk):
        if type(chunk) not in FRAMEWORK.DENSE_TYPES:
            session.refuse(
                f"gives a tensor for '{part.name}' that is not plain memory",
                "a plain tensor", type_name(type(chunk)), "describe and give the plain tensors inside of that tensor",
            )
    elif not isinstance(chunk, np.ndarray):
        return _of_buffer(session, part, shape, chunk, writable)
    given = f"{str(chunk.dtype).removeprefix('torch.')} {tuple(chunk.shape)}"
    if given != expected:
        session.refuse(
            f"gives a chunk for '{part.name}' that differs from its description", expected, given,
            "correct describe() or chunks()"
        )
    if writable and isinstance(chunk, np.ndarray) and not chunk.flags.writeable:
        _refuse_read_only(session, part, chunk)
    return chunk


def _refuse_read_only(session: ProviderSession, part: Part, chunk: object) -> NoReturn:
    session.refuse(
        f"gives read-only memory for '{part.name}'", "writable memory",
        f"a read-only {type_name(type(chunk))}", "give a writable buffer, or describe the part as resizable"
    )


def _of_buffer(
    session: ProviderSession, part: Part, shape: tuple[int, ...], chunk: object, writable: bool
) -> Any:
    """Memory with the buffer protocol, as an array with the dtype and shape that the part describes."""
    try:
        view = memoryview(chunk)  # type: ignore[arg-type]
        if not view.c_contiguous:
            raise BufferError("the memory is not contiguous")
    except (TypeError, BufferError) as error:
        session.refuse(
            f"gives a chunk for '{part.name}' that is not memory", "a tensor, array or contiguous buffer",
            f"{type_name(type(chunk))} ({error})", "describe this part as an ObjectPart, or give its memory", error
        )
    bytes_described = Box.whole(shape).elements * DTYPES[part.dtype].item_bytes
    if view.nbytes != bytes_described:
        session.refuse(
            f"gives a chunk for '{part.name}' that differs from its description", f"{bytes_described} bytes",
            f"{view.nbytes} bytes", "correct describe() or chunks()"
        )
    if writable and view.readonly:
        _refuse_read_only(session, part, chunk)
    raw = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if numpy_has(DTYPES[part.dtype]):
        return raw.view(part.dtype).reshape(shape)
    return FRAMEWORK.tensor_over(raw, DTYPES[part.dtype], shape)
