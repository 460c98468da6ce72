"""Compare two checkpoints of any known format by name and by value, in bounded memory."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES, MIB, whole_number
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, BUDGET_BYTES_MIN
from flowstone.convert.digests import unequal_chunks, unequal_runs
from flowstone.convert.elements import Differences, Tolerance, compare, has_numbers
from flowstone.convert.fetch import Fetcher, FetchRequest
from flowstone.convert.followers import OptimizerMapping
from flowstone.convert.layout import Output
from flowstone.convert.mapping import ConversionRules, all_names, check_mapped, check_rules, non_tensor_leaves
from flowstone.convert.opening import open_source
from flowstone.convert.source import SourceCheckpoint
from flowstone.errors import ArgumentError, BudgetError, CollisionError, NoTensorError
from flowstone.format.documents import DOCUMENTS_SECTION
from flowstone.layouts.layout_rules import GivenRules
from flowstone.layouts.rearrange import Followers, Origin, rearrange
from flowstone.reading.checkpoint import Checkpoint
from flowstone.rules.load_rules import STATE
from flowstone.store.base import Store
from flowstone.stores.arguments import check_work, to_section
from flowstone.table.stored import SourceTensor

_SHARES = 8  # parts of the budget: staging memory and two windows for each side; the rest for temporary memory
_SHOWN = 80  # how many characters of a value are shown


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """Comparison of a tensor that both checkpoints have. Pairs are (first checkpoint, second checkpoint).

    unequal       number of elements that differ by more than the tolerance; NaN equals NaN, and 0 equals -0. None: the
                  shapes differ, or nothing was read (`digests_only`)
    unequal_bits  number of elements whose bytes differ; if the types differ, the same as `unequal`
    largest_absolute  the largest |a - b|; None if the types are not numeric, or the shapes differ
    largest_relative  the largest |a - b| / max(|a|, |b|) of finite numbers
    largest_at    the index of the element with the largest |a - b|
    nans          the number of NaN elements in each
    by_digest     whether the tensor was not read because all digests are equal
    unread        number of elements that were not read because their chunks have equal digests; NaNs among them are not
                  counted
    chunks        with `digests_only`: (number of chunks whose digests differ, number of all chunks); None: the digests
                  cannot be compared
    equal         whether there is no difference beyond the tolerance
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    equal: bool
    unequal: int | None = None
    unequal_bits: int | None = None
    largest_absolute: float | None = None
    largest_relative: float | None = None
    largest_at: tuple[int, ...] | None = None
    nans: tuple[int, int] = (0, 0)
    by_digest: bool = False
    unread: int = 0
    chunks: tuple[int, int] | None = None

    @property
    def elements(self) -> int:
        """The number of elements of the first checkpoint's tensor."""
        return math.prod(self.shapes[0])


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A value other than a tensor that differs between the checkpoints, as text; None if a checkpoint lacks it."""

    name: str
    values: tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ.

    only_in_a, only_in_b  names of tensors that only one checkpoint has
    tensors               the comparison of each tensor that both have, in the order of the first
    tied_names            names of tied tensors that one checkpoint lacks, because its format (safetensors) stores tied
                          tensors once, under another name
    values                the values that differ and are not tensors
    bytes                 how many bytes were compared, in both checkpoints together
    """

    a: str
    b: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...]
    bytes: int
    seconds: float
    tied_names: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether there is no difference beyond the tolerance."""
        return not (self.only_in_a or self.only_in_b or self.values or self.differing)

    @property
    def differing(self) -> tuple[TensorDiff, ...]:
        """The tensors that both checkpoints have, with different values."""
        return tuple(tensor for tensor in self.tensors if not tensor.equal)


class _Pair(msgspec.Struct, frozen=True, eq=False):
    """Two tensors to compare, and their names in both checkpoints."""

    names: tuple[str, ...]
    a: Output
    b: Output


class _PairRange(msgspec.Struct, frozen=True, eq=False):
    """The elements `begin` to `end` - 1 of both tensors of a pair. They are read and compared as a part of one window
    (see _Comparison).

    pair  number of the pair
    """

    pair: int
    begin: int
    end: int


def diff(
    a: str | os.PathLike[str] | Store | Checkpoint, b: str | os.PathLike[str] | Store | Checkpoint, *,
    step_a: int | None = None, step_b: int | None = None, section: str | None = None, names: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (), rules: GivenRules = (), rtol: float = 0.0, atol: float = 0.0,
    ignore_dtype: bool = False, trust_digests: bool = False, digests_only: bool = False,
    budget_bytes: int = BUDGET_BYTES_DEFAULT, on_progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints by name and by value, in bounded memory. Blocks.

    a, b          stores, checkpoints, or any format that `import_checkpoint` reads; in a bucket, only Flowstone's
    step_a, step_b  steps of stores; None: the newest
    section       compare only this section; None or "": all. If only one format has sections, the tensors of the other
                  one are compared as if they were in `section`, or in "model" for None; for "", their names must begin
                  with a section's name
    names, skip   shell patterns: the names to compare, and the names to leave out
    rules         applied to the tensors of `a` before they are compared, for example if another program wrote `a`
    rtol, atol    elements are equal if |a - b| <= atol + rtol * |b|
    ignore_dtype  whether tensors of two types may be equal; their values are compared in any case
    trust_digests for two Flowstone checkpoints: read only chunks whose digests differ, of tensors saved in the same
                  parts in both. Deliberate changes, and damage of chunks that are not read, may go unnoticed
    digests_only  for two Flowstone checkpoints: read no tensors. Tensors count as equal if all their digests are equal;
                  the report counts chunks that differ. Tensors saved in other parts, cast, or encoded differently count
                  as different. Cannot be combined with `rtol`, `atol`, `ignore_dtype` or `trust_digests`
    budget_bytes  memory for data that is being read and compared

    raises  NoTensorError if no name matches, or a checkpoint lacks the section; UnsupportedFormatError for values of
            unknown types that are not skipped; DamagedError, NotAStoreError, ArgumentError, ...
    """
    begun, flat_section = time.monotonic(), "model" if section is None else to_section(section)
    check_work(on_progress=on_progress)
    tolerance, included, left_out = _tolerance(rtol, atol), _patterns(names), _patterns(skip)
    _check_alone(digests_only, rtol, atol, ignore_dtype, trust_digests)
    sources = open_source(a, step_a), open_source(b, step_b)
    are_flat = all(source.is_flat for source in sources)
    prefixes = [f"{flat_section}." if flat_section and source.is_flat and not are_flat else "" for source in sources]
    select = _Selection(included, left_out, "" if are_flat else section or "")
    source_rules = check_rules(rules, sources[0], flat_section), ConversionRules((), ())
    tensors, values = [], []
    for source, prefix, found_rules in zip(sources, prefixes, source_rules, strict=True):
        with OptimizerMapping(source, found_rules.steps, partial(_is_left_out, select, found_rules)) as follow:
            tensors.append(_tensors(source, prefix, select, found_rules, follow.slots))
            values.append(_values(source, select, found_rules, follow.objects(all_names(source))))
    _check_chosen(select, sources, [{*names, *other_names} for names, other_names in zip(tensors, values, strict=True)])
    pairs, read_bytes = _pairs(*tensors), 0
    if digests_only:
        compared = [item for pair in pairs for item in _by_digests(sources, pair)]
    else:
        work = _Comparison(sources, pairs, tolerance, trust_digests, budget_bytes)
        differences, read_bytes = work.run(on_progress), work.bytes
        compared = [
            _tensor_diff(name, pair, differences[index], ignore_dtype=ignore_dtype, unread=work.unread(index))
            for index, pair in enumerate(pairs) for name in pair.names
        ]
    tied, order = _tied(tensors, sources), {name: position for position, name in enumerate(tensors[0])}
    return DiffReport(
        a=sources[0].location, b=sources[1].location,
        only_in_a=_only(tensors[0], {*tensors[1], *tied}), only_in_b=_only(tensors[1], {*tensors[0], *tied}),
        tensors=tuple(sorted(compared, key=lambda item: order[item.name])), values=_differing_values(*values),
        bytes=read_bytes, seconds=time.monotonic() - begun, tied_names=tied,
    )


def _check_chosen(select: _Selection, sources: Sequence[SourceCheckpoint], names: Sequence[Collection[str]]) -> None:
    """Raise NoTensorError if a pattern matches no name of either checkpoint, or one checkpoint lacks the section."""
    for source, chosen in zip(sources, names, strict=True):
        if select.section and not chosen:
            raise NoTensorError(
                f"{source.location} has no section {select.section!r}",
                next="give a section that both checkpoints have, or none to compare everything",
            )
    idle = select.unmatched_patterns([name for chosen in names for name in chosen])
    if idle:
        raise NoTensorError(f"no name in either checkpoint matches {', '.join(idle)}", next="correct the pattern")


def _only(names: Iterable[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def _tied(tensors: Sequence[Mapping[str, SourceTensor]], sources: Sequence[SourceCheckpoint]) -> tuple[str, ...]:
    """The names that one checkpoint lacks because its format stores tied tensors once, under another name."""
    names: list[str] = []
    for mine, theirs, other in zip(tensors, reversed(tensors), reversed(sources), strict=True):
        if other.kind == "safetensors":
            both = {id(tensor) for name, tensor in mine.items() if name in theirs}
            names += [name for name, tensor in mine.items() if name not in theirs and id(tensor) in both]
    return tuple(names)


class _Selection(msgspec.Struct, frozen=True):
    """Which names are compared: those that match `names` and not `skip`, in one section (all sections if `section` is
    empty).
    """

    names: tuple[str, ...]
    skip: tuple[str, ...]
    section: str = ""

    def has(self, name: str) -> bool:
        is_chosen = any(fnmatchcase(name, pattern) for pattern in self.names) and not self.skips(name)
        return is_chosen and self.is_of_section(name)

    def is_of_section(self, name: str) -> bool:
        return not self.section or name == self.section or name.startswith((f"{self.section}.", f"{self.section}@"))

    def unmatched_patterns(self, names: Collection[str]) -> list[str]:
        """The patterns that match none of these names."""
        return [pattern for pattern in self.names if not any(fnmatchcase(name, pattern) for name in names)]

    def may_match_in(self, section: str) -> bool:
        """Whether a pattern could match a name that begins with the name of this section."""
        heads = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in self.names]
        return any(f"{section}.".startswith(head) or head.startswith(f"{section}.") for head in heads)

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.skip)


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else (given,)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ArgumentError(f"names and skip must be patterns, got {given!r:.60}", next='write "model.*", or a list')
    return patterns


def _tolerance(relative: float, absolute: float) -> Tolerance:
    for name, value in (("rtol", relative), ("atol", absolute)):
        if not isinstance(value, int | float) or not (0 <= value < math.inf):
            raise ArgumentError(f"{name} must be a number of at least 0, got {value!r:.40}", next=f"correct {name}")
    return Tolerance(float(relative), float(absolute))


def _check_alone(digests_only: bool, *others: object) -> None:
    """Raise ArgumentError if `digests_only` is combined with an option that needs the values."""
    if digests_only and any(others):
        raise ArgumentError(
            "digests_only cannot be combined with rtol, atol, ignore_dtype or trust_digests",
            next="leave out `digests_only`, or all of the other options named here",
        )


def _is_left_out(select: _Selection, rules: ConversionRules, name: str) -> bool:
    """Whether the name of an optimizer, or of one of its tensors, is left out of the comparison."""
    is_of_other = not select.is_of_section(name) or not select.may_match_in(name.partition(STATE)[0])
    return rules.skip(name) or select.skips(name) or is_of_other


def _tensors(
    source: SourceCheckpoint, prefix: str, select: _Selection, rules: ConversionRules, slots: Followers | None
) -> dict[str, SourceTensor]:
    unmapped = [value for value in source.unmapped if not rules.skip(value.name) and select.has(prefix + value.name)]
    check_mapped(source, unmapped)
    every = {
        name: tensor for name, tensor in all_names(source).items()
        if not rules.skip(name) and not select.skips(prefix + name)
    }
    arranged = rearrange(every, rules.steps, Origin(source.location, followers=slots))
    return {prefix + name: tensor for name, tensor in arranged.items() if select.has(prefix + name)}


def _values(
    source: SourceCheckpoint, select: _Selection, rules: ConversionRules, followed: Mapping[str, object]
) -> Mapping[str, object]:
    """The values other than tensors: dotted name -> value. `followed`: the source's objects, to which the rules were
    applied.
    """
    objects = dict(followed)
    if source.documents:
        objects.setdefault(DOCUMENTS_SECTION, dict(source.documents))
    for section, ranks in source.per_rank.items():
        objects |= {f"{section}@{rank}": value for rank, value in enumerate(ranks)}
    values: dict[str, object] = {}
    for name, value in (leaf for section, inner in objects.items() for leaf in non_tensor_leaves(section, inner)):
        if not select.has(name) or rules.skip(name):
            continue
        if name in values:
            raise CollisionError(
                f"two values of {source.location} have the name {name!r:.200} (keys such as 1 and '1' collide)",
                next="leave them out with --skip PATTERN",
            )
        values[name] = value
    return values


def _differing_values(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[ValueDiff, ...]:
    differing = (name for name in {**a, **b} if name not in a or name not in b or not _same(a[name], b[name]))
    return tuple(
        ValueDiff(name, (repr(a[name])[:_SHOWN] if name in a else None, repr(b[name])[:_SHOWN] if name in b else None))
        for name in differing
    )


def _same(a: object, b: object) -> bool:
    """Whether two values other than tensors are equal. Their texts are compared, too, so that NaN equals NaN."""
    return type(a) is type(b) and (bool(a == b) or repr(a) == repr(b))


def _pairs(a: Mapping[str, SourceTensor], b: Mapping[str, SourceTensor]) -> list[_Pair]:
    """The pairs of tensors that both checkpoints have. Tied tensors form only one pair."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, tensor in a.items():
        if name in b:
            names.setdefault((id(tensor), id(b[name])), []).append(name)
    pairs = []
    for listed in names.values():
        x, y = a[listed[0]], b[listed[0]]
        pairs.append(_Pair(tuple(listed), Output(x.name, x, x.dtype), Output(y.name, y, y.dtype)))
    return pairs


class _Comparison:
    """Compares pairs of tensors, one window after the other. A window is a list of ranges of elements, of one or more
    pairs, that fit into the memory together. The next window is read while this one is compared.
    """

    def __init__(
        self, sources: tuple[SourceCheckpoint, SourceCheckpoint], pairs: Sequence[_Pair], tolerance: Tolerance,
        trust_digests: bool,
        budget_bytes: int,
    ) -> None:
        budget_bytes = whole_number("budget_bytes", budget_bytes)
        if budget_bytes < BUDGET_BYTES_MIN:
            raise BudgetError(
                f"budget_bytes={budget_bytes} is too small to compare checkpoints",
                expected=f"at least {BUDGET_BYTES_MIN} bytes", next="raise budget_bytes",
            )
        self.pairs, self._sources, self._tolerance = pairs, sources, tolerance
        self._window_bytes = budget_bytes // _SHARES // MIB * MIB
        self._read: dict[int, list[tuple[int, int]]] = {}  # number of a pair -> the ranges of elements that are read
        for index, pair in enumerate(pairs):
            runs = unequal_runs(sources, pair.a.tensor, pair.b.tensor) if trust_digests else None
            if pair.a.tensor.shape == pair.b.tensor.shape:
                self._read[index] = [(0, math.prod(pair.a.tensor.shape))] if runs is None else runs
        self.bytes = sum(
            (end - begin) * (pairs[index].a.dtype.item_bytes + pairs[index].b.dtype.item_bytes)
            for index, runs in self._read.items() for begin, end in runs
        )

    def unread(self, pair: int) -> int:
        """The number of elements of a pair that are not read because their digests are equal."""
        return math.prod(self.pairs[pair].a.tensor.shape) - sum(end - begin for begin, end in self._read.get(pair, ()))

    def run(self, on_progress: Callable[[int, int], None] | None) -> dict[int, Differences | None]:
        """Returns: number of a pair -> its differences; None if the shapes differ. If all digests of a pair are equal,
        its `Differences` are empty.
        """
        results: dict[int, Differences | None] = dict.fromkeys(range(len(self.pairs)))
        results |= {
            index: _no_differences(self.pairs[index]) if runs or not self.unread(index) else Differences()
            for index, runs in self._read.items()
        }
        done = 0
        sides = [_SideReader(source, self._window_bytes) for source in self._sources]
        try:
            with ThreadPoolExecutor(2, "flowstone-diff") as pool:
                windows, number = self._windows(), 0
                window = next(windows, None)
                reading = self._submit(pool, sides, window, number)
                while window is not None:
                    memory = [future.result() for future in reading]
                    following, number = next(windows, None), number + 1
                    reading = self._submit(pool, sides, following, number)
                    done += self._compare(window, memory, results)
                    window = following
                    if on_progress is not None:
                        on_progress(done, self.bytes)
        finally:
            for side in sides:
                side.close()
        return results

    def _windows(self) -> Iterator[list[_PairRange]]:
        """The windows. In each checkpoint, the elements of one window take at most `_window_bytes`."""
        window: list[_PairRange] = []
        left = self._window_bytes
        for index, begin, count in ((index, begin, end) for index, runs in self._read.items() for begin, end in runs):
            pair, first = self.pairs[index], begin
            item = max(pair.a.dtype.item_bytes, pair.b.dtype.item_bytes)
            while begin < count:
                if left < item or (begin == first and left < min((count - begin) * item, CHUNK_BYTES)):
                    yield window
                    window, left = [], self._window_bytes
                end = min(count, begin + left // item)
                window.append(_PairRange(index, begin, end))
                # so that each range begins at an address that is aligned for any type
                left -= -(-(end - begin) * item // 16) * 16
                begin = end
        if window:
            yield window

    def _submit(
        self, pool: ThreadPoolExecutor, sides: Sequence[_SideReader], window: list[_PairRange] | None, number: int
    ) -> list[Future[list[NDArray[np.uint8]]]]:
        if window is None:
            return []
        outputs = [[(self.pairs[run.pair].a, run) for run in window], [(self.pairs[run.pair].b, run) for run in window]]
        return [pool.submit(side.read, rows, number) for side, rows in zip(sides, outputs, strict=True)]

    def _compare(
        self, window: Sequence[_PairRange], memory: Sequence[Sequence[NDArray[np.uint8]]],
        differences: dict[int, Differences | None],
    ) -> int:
        """Compare the elements of a window, and add their differences to `differences`. Returns the number of compared
        bytes.
        """
        for run, a, b in zip(window, *memory, strict=True):
            pair, before = self.pairs[run.pair], differences[run.pair]
            assert before is not None, "only pairs of equal shapes are read"
            later = compare(a, b, (pair.a.dtype, pair.b.dtype), self._tolerance, run.begin)
            differences[run.pair] = before.merged_with(later)
        return sum(len(part) for side in memory for part in side)


class _SideReader:
    """Reads ranges of one checkpoint into two windows of memory, alternately. For one thread at a time."""

    def __init__(self, source: SourceCheckpoint, window_bytes: int) -> None:
        self._fetcher = Fetcher(source, window_bytes)
        self._memory = [np.empty(window_bytes, np.uint8) for _ in range(2)]

    def read(self, rows: Sequence[tuple[Output, _PairRange]], number: int) -> list[NDArray[np.uint8]]:
        memory, offset, parts, requests = self._memory[number % 2], 0, [], []
        for output, run in rows:
            item = output.dtype.item_bytes
            length = (run.end - run.begin) * item
            part = memory[offset : offset + length]
            offset += -(-length // 16) * 16
            parts.append(part)
            requests.append(FetchRequest(output, run.begin * item, run.end * item, part))
        self._fetcher.fetch(requests)
        return parts

    def close(self) -> None:
        self._fetcher.close()


def _no_differences(pair: _Pair) -> Differences:
    is_known = has_numbers(pair.a.dtype) and has_numbers(pair.b.dtype)
    return Differences() if is_known else Differences(absolute=None, relative=None)


def _by_digests(sources: tuple[SourceCheckpoint, SourceCheckpoint], pair: _Pair) -> list[TensorDiff]:
    """The result of comparing a pair by digests alone: one TensorDiff for each of its names."""
    dtypes, shapes = (pair.a.dtype.name, pair.b.dtype.name), (pair.a.tensor.shape, pair.b.tensor.shape)
    chunks = unequal_chunks(sources, pair.a.tensor, pair.b.tensor)
    if dtypes[0] == dtypes[1] and shapes[0] == shapes[1] and not math.prod(shapes[0]):
        chunks = 0, 0
    is_equal = chunks is not None and not chunks[0]
    return [
        TensorDiff(
            name, dtypes, shapes, equal=is_equal, by_digest=is_equal, unread=math.prod(shapes[0]) if is_equal else 0,
            chunks=chunks,
        ) for name in pair.names
    ]


def _tensor_diff(
    name: str, pair: _Pair, result: Differences | None, *, ignore_dtype: bool, unread: int
) -> TensorDiff:
    a, b = pair.a, pair.b
    dtypes, shapes = (a.dtype.name, b.dtype.name), (a.tensor.shape, b.tensor.shape)
    if result is None:
        return TensorDiff(name, dtypes, shapes, equal=False)
    largest = None if result.largest_index is None else tuple(
        map(int, np.unravel_index(result.largest_index, shapes[0] or (1,)))
    )
    return TensorDiff(
        name, dtypes, shapes, equal=not result.unequal and (ignore_dtype or a.dtype is b.dtype), unequal=result.unequal,
        unequal_bits=result.unequal_bits, largest_absolute=result.absolute, largest_relative=result.relative,
        largest_at=largest if shapes[0] or largest is None else (), nans=result.nans,
        by_digest=0 < unread == math.prod(shapes[0]), unread=unread,
    )


__all__ = ["DiffReport", "TensorDiff", "ValueDiff", "diff"]
