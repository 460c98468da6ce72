"""Diff: two checkpoints of any known formats, by name and by value, through a bounded window of each."""

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

from flowstone.arguments import check_work, to_section
from flowstone.checkpoint import Checkpoint
from flowstone.config import CHUNK_BYTES, MIB, whole_number
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, BUDGET_BYTES_MIN
from flowstone.convert.digests import unequal_chunks, unequal_runs
from flowstone.convert.elements import Differences, Tolerance, compare, has_numbers
from flowstone.convert.fetch import Fetcher, Wanted
from flowstone.convert.followers import Follow
from flowstone.convert.layout import Output
from flowstone.convert.mapping import Rules, all_names, check_mapped, check_rules, leaves
from flowstone.convert.opening import open_source
from flowstone.convert.source import Source
from flowstone.errors import ArgumentError, BudgetError, CollisionError, NoTensorError
from flowstone.format.documents import DOCUMENTS_SECTION
from flowstone.layout_rules import GivenRules
from flowstone.plan.rearrange import Followers, Origin, rearranged
from flowstone.rules import STATE
from flowstone.store.base import Store
from flowstone.table.stored import SourceTensor

_SHARES = 8  # of the budget: for each side staging memory and two windows, and what comparisons take
_SHOWN = 80  # characters of a value


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor that both checkpoints have. Pairs are of the first checkpoint and the second.

    unequal       elements that differ by more than the tolerance; NaN equals NaN, 0 equals -0. None: shapes differ, or
                  nothing was read (`digests_only`)
    unequal_bits  elements whose bytes differ; of two types, the same as `unequal`
    largest_absolute  |a - b|; None where the types have no numbers, or shapes differ
    largest_relative  |a - b| / max(|a|, |b|), of finite numbers
    largest_at    the index of the element with the largest |a - b|
    nans          how many of the elements are NaN
    by_digest     whether it was not read, as all digests are equal
    unread        elements that were not read, as their chunks have equal digests; NaNs among them are not counted
    chunks        with `digests_only`: how many have other digests, of how many; None: digests say nothing
    equal         nothing differs but what the call tolerates
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
        """Of the first checkpoint's tensor."""
        return math.prod(self.shapes[0])


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A value that is no tensor and differs, as text; None where one checkpoint lacks it."""

    name: str
    values: tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ.

    only_in_a, only_in_b  names of tensors that the other lacks
    tensors  all that both have, in the order of the first
    tied_names  that only one side has, of tied tensors that the other stores once, under another name (safetensors)
    values   those that are no tensors and differ
    bytes    that were compared, of both together
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
        """Whether nothing differs but what the call tolerates."""
        return not (self.only_in_a or self.only_in_b or self.values or self.differing)

    @property
    def differing(self) -> tuple[TensorDiff, ...]:
        """The tensors that both have and that are not equal."""
        return tuple(tensor for tensor in self.tensors if not tensor.equal)


class _Pair(msgspec.Struct, frozen=True, eq=False):
    """Two tensors that are compared, and the names that both checkpoints give them."""

    names: tuple[str, ...]
    a: Output
    b: Output


class _Run(msgspec.Struct, frozen=True, eq=False):
    """Elements [begin, end) of a pair, and their place in the window."""

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

    a, b          stores, checkpoints, or what `import_checkpoint` reads; each of any format. In a bucket: of ours
    step_a, step_b  of stores; None: the newest
    section       compare only this section of both; None or "": all. Names in a format without sections (safetensors,
                  a state_dict) are taken to be in it, or in "model" for None; for "" they are full names
    names, skip   shell patterns: what is compared, and what of that is not
    rules         what becomes of the tensors of `a` before they are compared: it is another program's, perhaps
    rtol, atol    elements are equal if |a - b| <= atol + rtol * |b|
    ignore_dtype  whether tensors of two types may be equal; their values are compared in any case
    trust_digests of two checkpoints of ours: chunks of tensors with equal boxes that have equal digests are equal, and
                  only what the others hold is read. XXH3-64 finds accidents, not intent, and what is on the disk now of
                  the equal ones is not looked at
    digests_only  of two checkpoints of ours: read no tensors at all. A tensor is equal if all its digests are, and the
                  report counts the chunks that differ. What was saved in other pieces, in another type, or encoded in
                  another way, counts as different. Not together with the four above
    budget_bytes  of memory for bytes on their way

    raises  NoTensorError where no name matches, or one lacks the section; UnsupportedFormatError for values that are
            not known and not skipped; DamagedError, NotAStoreError, ArgumentError, ...
    """
    begun, flat_section = time.monotonic(), "model" if section is None else to_section(section)
    check_work(on_progress=on_progress)
    tolerance, wanted, left_out = _tolerance(rtol, atol), _patterns(names), _patterns(skip)
    _check_alone(digests_only, rtol, atol, ignore_dtype, trust_digests)
    sources = open_source(a, step_a), open_source(b, step_b)
    are_flat = all(one.is_flat for one in sources)
    prefixes = [f"{flat_section}." if flat_section and one.is_flat and not are_flat else "" for one in sources]
    select = _Selection(wanted, left_out, "" if are_flat else section or "")
    known = check_rules(rules, sources[0], flat_section), Rules((), ())
    tensors, values = [], []
    for source, prefix, found_rules in zip(sources, prefixes, known, strict=True):
        with Follow(source, found_rules.steps, partial(_is_left_out, select, found_rules)) as follow:
            tensors.append(_tensors(source, prefix, select, found_rules, follow.slots))
            values.append(_values(source, select, found_rules, follow.objects(all_names(source))))
    _check_chosen(select, sources, [{*one, *other} for one, other in zip(tensors, values, strict=True)])
    pairs, read_bytes = _pairs(*tensors), 0
    if digests_only:
        compared = [one for pair in pairs for one in _by_digests(sources, pair)]
    else:
        work = _Work(sources, pairs, tolerance, trust_digests, budget_bytes)
        found, read_bytes = work.run(on_progress), work.bytes
        compared = [
            _described(name, pair, found[at], ignore_dtype=ignore_dtype, unread=work.unread(at))
            for at, pair in enumerate(pairs) for name in pair.names
        ]
    tied, order = _tied(tensors, sources), {name: at for at, name in enumerate(tensors[0])}
    return DiffReport(
        a=sources[0].location, b=sources[1].location,
        only_in_a=_only(tensors[0], {*tensors[1], *tied}), only_in_b=_only(tensors[1], {*tensors[0], *tied}),
        tensors=tuple(sorted(compared, key=lambda one: order[one.name])), values=_differing_values(*values),
        bytes=read_bytes, seconds=time.monotonic() - begun, tied_names=tied,
    )


def _check_chosen(select: _Selection, sources: Sequence[Source], names: Sequence[Collection[str]]) -> None:
    """Raise NoTensorError if a pattern matches nothing in either, or the section is empty in one of them."""
    for source, chosen in zip(sources, names, strict=True):
        if select.section and not chosen:
            raise NoTensorError(
                f"{source.location} has nothing in the section {select.section!r}",
                next="give a section that both have, or none to compare everything",
            )
    idle = select.idle([name for chosen in names for name in chosen])
    if idle:
        raise NoTensorError("no name of either checkpoint matches", found=", ".join(idle), next="correct the pattern")


def _only(names: Iterable[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def _tied(tensors: Sequence[Mapping[str, SourceTensor]], sources: Sequence[Source]) -> tuple[str, ...]:
    """Names that one side lacks because its format stores tied tensors once, under another name."""
    found: list[str] = []
    for mine, theirs, other in zip(tensors, reversed(tensors), reversed(sources), strict=True):
        if other.kind == "safetensors":
            both = {id(tensor) for name, tensor in mine.items() if name in theirs}
            found += [name for name, tensor in mine.items() if name not in theirs and id(tensor) in both]
    return tuple(found)


class _Selection(msgspec.Struct, frozen=True):
    """Patterns: which names are compared; of one section alone, if it is not empty."""

    names: tuple[str, ...]
    skip: tuple[str, ...]
    section: str = ""

    def has(self, name: str) -> bool:
        is_chosen = any(fnmatchcase(name, one) for one in self.names) and not self.skips(name)
        return is_chosen and self.is_of_section(name)

    def is_of_section(self, name: str) -> bool:
        return not self.section or name == self.section or name.startswith((f"{self.section}.", f"{self.section}@"))

    def idle(self, found: Collection[str]) -> list[str]:
        """The patterns that chose none of these: what they were to compare has not been looked at."""
        return [one for one in self.names if not any(fnmatchcase(name, one) for name in found)]

    def speaks_of(self, section: str) -> bool:
        """Whether a pattern may choose names below a section, whatever these are."""
        heads = [re.split(r"[*?\[]", one, maxsplit=1)[0] for one in self.names]
        return any(f"{section}.".startswith(head) or head.startswith(f"{section}.") for head in heads)

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, one) for one in self.skip)


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else (given,)
    if not all(isinstance(one, str) and one for one in found):
        raise ArgumentError(f"{given!r:.60} is no pattern of names", next="write \"model.*\", or a list of such")
    return found


def _tolerance(relative: float, absolute: float) -> Tolerance:
    for name, value in (("rtol", relative), ("atol", absolute)):
        if not isinstance(value, int | float) or not (0 <= value < math.inf):
            raise ArgumentError(f"{name} {value!r:.40} is no tolerance", next="give a number from 0 on")
    return Tolerance(float(relative), float(absolute))


def _check_alone(digests_only: bool, *others: object) -> None:
    """Digests know no tolerance."""
    if digests_only and any(others):
        raise ArgumentError(
            "digests_only tells only which bytes differ", found="rtol, atol, ignore_dtype or trust_digests",
            next="leave these out, or digests_only",
        )


def _is_left_out(select: _Selection, rules: Rules, name: str) -> bool:
    """Whether what becomes of an optimizer's slot, or of an optimizer, is not compared."""
    is_of_other = not select.is_of_section(name) or not select.speaks_of(name.partition(STATE)[0])
    return rules.skip(name) or select.skips(name) or is_of_other


def _tensors(
    source: Source, prefix: str, select: _Selection, rules: Rules, slots: Followers | None
) -> dict[str, SourceTensor]:
    unmapped = [one for one in source.unmapped if not rules.skip(one.name) and select.has(prefix + one.name)]
    check_mapped(source, unmapped)
    every = {
        name: tensor for name, tensor in all_names(source).items()
        if not rules.skip(name) and not select.skips(prefix + name)
    }
    found = rearranged(every, rules.steps, Origin(source.location, followers=slots))
    return {prefix + name: tensor for name, tensor in found.items() if select.has(prefix + name)}


def _values(
    source: Source, select: _Selection, rules: Rules, followed: Mapping[str, object]
) -> Mapping[str, object]:
    """What is no tensor, by dotted names. `followed`: the source's objects, as its rules have them."""
    objects = dict(followed)
    if source.documents:
        objects.setdefault(DOCUMENTS_SECTION, dict(source.documents))
    for section, ranks in source.per_rank.items():
        objects |= {f"{section}@{rank}": value for rank, value in enumerate(ranks)}
    found: dict[str, object] = {}
    for name, value in (leaf for section, inner in objects.items() for leaf in leaves(section, inner)):
        if not select.has(name) or rules.skip(name):
            continue
        if name in found:
            raise CollisionError(
                f"two values of {source.location} are called {name!r:.200}, as those of the keys 1 and '1' are",
                next="leave them out with --skip PATTERN",
            )
        found[name] = value
    return found


def _differing_values(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[ValueDiff, ...]:
    differing = (name for name in {**a, **b} if name not in a or name not in b or not _same(a[name], b[name]))
    return tuple(
        ValueDiff(name, (repr(a[name])[:_SHOWN] if name in a else None, repr(b[name])[:_SHOWN] if name in b else None))
        for name in differing
    )


def _same(one: object, other: object) -> bool:
    """Of values that are no tensors; their text says all of them, NaN included."""
    return type(one) is type(other) and (bool(one == other) or repr(one) == repr(other))


def _pairs(a: Mapping[str, SourceTensor], b: Mapping[str, SourceTensor]) -> list[_Pair]:
    """What both have. Tied tensors are compared once."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, tensor in a.items():
        if name in b:
            names.setdefault((id(tensor), id(b[name])), []).append(name)
    found = []
    for listed in names.values():
        one, other = a[listed[0]], b[listed[0]]
        found.append(_Pair(tuple(listed), Output(one.name, one, one.dtype), Output(other.name, other, other.dtype)))
    return found


class _Work:
    """The pairs whose values are to be read, in windows: the next one is read while one is compared."""

    def __init__(
        self, sources: tuple[Source, Source], pairs: Sequence[_Pair], tolerance: Tolerance, trust_digests: bool,
        budget_bytes: int,
    ) -> None:
        budget_bytes = whole_number("budget_bytes", budget_bytes)
        if budget_bytes < BUDGET_BYTES_MIN:
            raise BudgetError(
                f"checkpoints cannot be compared within {budget_bytes} bytes",
                expected=f"at least {BUDGET_BYTES_MIN} bytes", next="raise budget_bytes",
            )
        self.pairs, self._sources, self._tolerance = pairs, sources, tolerance
        self._window_bytes = budget_bytes // _SHARES // MIB * MIB
        self._read: dict[int, list[tuple[int, int]]] = {}  # of each pair, runs of elements
        for at, pair in enumerate(pairs):
            runs = unequal_runs(sources, pair.a.tensor, pair.b.tensor) if trust_digests else None
            if pair.a.tensor.shape == pair.b.tensor.shape:
                self._read[at] = [(0, math.prod(pair.a.tensor.shape))] if runs is None else runs
        self.bytes = sum(
            (end - begin) * (pairs[at].a.dtype.item_bytes + pairs[at].b.dtype.item_bytes)
            for at, runs in self._read.items() for begin, end in runs
        )

    def unread(self, at: int) -> int:
        """How many elements of a pair are not read, as digests prove them equal."""
        return math.prod(self.pairs[at].a.tensor.shape) - sum(end - begin for begin, end in self._read.get(at, ()))

    def run(self, on_progress: Callable[[int, int], None] | None) -> dict[int, Differences | None]:
        """What differs of each pair; None where shapes do, and of those that digests prove equal, nothing."""
        found: dict[int, Differences | None] = dict.fromkeys(range(len(self.pairs)))
        found |= {
            at: _nothing_yet(self.pairs[at]) if runs or not self.unread(at) else Differences()
            for at, runs in self._read.items()
        }
        done = 0
        sides = [_Side(source, self._window_bytes) for source in self._sources]
        try:
            with ThreadPoolExecutor(2, "flowstone-diff") as pool:
                windows, number = self._windows(), 0
                window = next(windows, None)
                reading = self._submit(pool, sides, window, number)
                while window is not None:
                    memory = [future.result() for future in reading]
                    following, number = next(windows, None), number + 1
                    reading = self._submit(pool, sides, following, number)
                    done += self._compare(window, memory, found)
                    window = following
                    if on_progress is not None:
                        on_progress(done, self.bytes)
        finally:
            for side in sides:
                side.close()
        return found

    def _windows(self) -> Iterator[list[_Run]]:
        """Runs of elements that fit into a window on either side."""
        window: list[_Run] = []
        left = self._window_bytes
        for at, begin, count in ((at, begin, end) for at, runs in self._read.items() for begin, end in runs):
            pair, first = self.pairs[at], begin
            item = max(pair.a.dtype.item_bytes, pair.b.dtype.item_bytes)
            while begin < count:
                if left < item or (begin == first and left < min((count - begin) * item, CHUNK_BYTES)):
                    yield window
                    window, left = [], self._window_bytes
                end = min(count, begin + left // item)
                window.append(_Run(at, begin, end))
                left -= -(-(end - begin) * item // 16) * 16  # each begins aligned to any type
                begin = end
        if window:
            yield window

    def _submit(
        self, pool: ThreadPoolExecutor, sides: Sequence[_Side], window: list[_Run] | None, number: int
    ) -> list[Future[list[NDArray[np.uint8]]]]:
        if window is None:
            return []
        outputs = [[(self.pairs[run.pair].a, run) for run in window], [(self.pairs[run.pair].b, run) for run in window]]
        return [pool.submit(side.read, rows, number) for side, rows in zip(sides, outputs, strict=True)]

    def _compare(
        self, window: Sequence[_Run], memory: Sequence[Sequence[NDArray[np.uint8]]],
        found: dict[int, Differences | None],
    ) -> int:
        """Enter what differs in a window; how many bytes that were."""
        for run, a, b in zip(window, *memory, strict=True):
            pair, before = self.pairs[run.pair], found[run.pair]
            assert before is not None, "what is read has its differences counted"
            later = compare(a, b, (pair.a.dtype, pair.b.dtype), self._tolerance, run.begin)
            found[run.pair] = before.and_then(later)
        return sum(len(part) for side in memory for part in side)


class _Side:
    """One checkpoint: reads runs of it into two windows in turn. One thread at a time."""

    def __init__(self, source: Source, window_bytes: int) -> None:
        self._fetcher = Fetcher(source, window_bytes)
        self._memory = [np.empty(window_bytes, np.uint8) for _ in range(2)]

    def read(self, rows: Sequence[tuple[Output, _Run]], number: int) -> list[NDArray[np.uint8]]:
        memory, at, found, wanted = self._memory[number % 2], 0, [], []
        for output, run in rows:
            item = output.dtype.item_bytes
            length = (run.end - run.begin) * item
            part = memory[at : at + length]
            at += -(-length // 16) * 16
            found.append(part)
            wanted.append(Wanted(output, run.begin * item, run.end * item, part))
        self._fetcher.fetch(wanted)
        return found

    def close(self) -> None:
        self._fetcher.close()


def _nothing_yet(pair: _Pair) -> Differences:
    is_known = has_numbers(pair.a.dtype) and has_numbers(pair.b.dtype)
    return Differences() if is_known else Differences(absolute=None, relative=None)


def _by_digests(sources: tuple[Source, Source], pair: _Pair) -> list[TensorDiff]:
    """What digests tell of a pair, by each of its names."""
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


def _described(
    name: str, pair: _Pair, found: Differences | None, *, ignore_dtype: bool, unread: int
) -> TensorDiff:
    a, b = pair.a, pair.b
    dtypes, shapes = (a.dtype.name, b.dtype.name), (a.tensor.shape, b.tensor.shape)
    if found is None:
        return TensorDiff(name, dtypes, shapes, equal=False)
    at = None if found.where is None else tuple(map(int, np.unravel_index(found.where, shapes[0] or (1,))))
    return TensorDiff(
        name, dtypes, shapes, equal=not found.unequal and (ignore_dtype or a.dtype is b.dtype), unequal=found.unequal,
        unequal_bits=found.unequal_bits, largest_absolute=found.absolute, largest_relative=found.relative,
        largest_at=at if shapes[0] or at is None else (), nans=found.nans,
        by_digest=0 < unread == math.prod(shapes[0]), unread=unread,
    )


__all__ = ["DiffReport", "TensorDiff", "ValueDiff", "diff"]
