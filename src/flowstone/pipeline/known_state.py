"""What is known of a state at the step that the next record of a journal begins from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import xxh3_64
from flowstone.commit.read import encode_sections
from flowstone.config import JOURNAL_VALUE_BYTES_MAX
from flowstone.format.journal import OptimizerRow, SourceRow
from flowstone.pipeline.journal_ranks import Stepped
from flowstone.pipeline.journal_records import Kept
from flowstone.stage.journal_frames import Source, bytes_at
from flowstone.state import Described
from flowstone.state.compressed import CompressedGradients, is_of, sources_of
from flowstone.state.stepped import (
    addresses_in_place,
    addresses_of,
    environment,
    local,
    parameter_keys,
    stepped_parameters,
)
from flowstone.table.pieces import Layout

if TYPE_CHECKING:
    import torch

    from flowstone.stage.far_values import FarValues


class Known(msgspec.Struct):
    """One state.

    layout    of the state; the next step must have the same
    proven    positions of the pieces that the optimizers' steps explain, and of those that are frozen
    still     of the latter, by position among the proven ones, the names
    exactness  of replays that go on from here: see format.journal.Opening
    others    positions of the pieces that they do not explain, and may change, in host memory
    far       those on devices; None: there are none
    digests   of these, and of sections, as they were last written
    options   of each optimizer, as they were last written
    sources   of compressed gradients, by section
    """

    layout: Layout
    proven: NDArray[np.int64]
    still: dict[int, str]
    exactness: str
    others: NDArray[np.int64]
    digests: dict[str, int]
    options: dict[int, tuple[msgspec.Raw, ...]]
    sources: dict[str, CompressedGradients]
    far: FarValues | None = None

    @property
    def unlogged(self) -> tuple[str, ...]:
        """Sections whose tensors and objects no step has: they do not follow from compressed gradients."""
        return tuple(section for section, source in self.sources.items() if not source.exact)

    def other_sources(self, state: Mapping[str, object]) -> str:
        """Why gradients of `state` are decompressed otherwise; "" if they are not."""
        here = sources_of(state)
        if not self.sources and not here:
            return ""
        same = {section: id(one) for section, one in here.items()}
        changed = same != {section: id(one) for section, one in self.sources.items()}
        return "what decompresses gradients has changed" if changed else ""

    def changed_values(self, described: Described) -> tuple[dict[str, Source], str]:
        """Copies of what no optimizer explains, and has changed, in host memory; and why that cannot be logged."""
        places, pieces, total = described.places, described.pieces, 0
        found: dict[str, Source] = {}
        lengths = pieces.lengths()
        for at in self.others.tolist():
            length, piece = int(lengths[at]), pieces[at]
            view = bytes_at(int(places.address[at]), length)
            digest = xxh3_64(view)
            if self.digests.get(piece.name) == digest:
                continue
            total += length
            if total > JOURNAL_VALUE_BYTES_MAX:
                return {}, f"'{piece.name}' has changed, which no optimizer explains, and is too large for the journal"
            self.digests[piece.name] = digest
            copy = Source.of_bytes(bytes(view))
            found[piece.name] = msgspec.structs.replace(copy, dtype=piece.dtype.name, shape=piece.box.shape)
        return found, ""

    def changed_far_values(self, described: Described) -> Callable[[], dict[str, Source]]:
        """The same of devices, which gather it now: the call that is returned waits for that. One thread at a time."""
        if self.far is None:
            return dict
        from flowstone.stage.far_values import gather_values  # imported here: most processes have no GPU

        return partial(self.far.changed, gather_values(described.pieces, described.places, self.far.at))

    def changed_sections(self, texts: Mapping[str, bytes]) -> dict[str, bytes]:
        """The sections whose objects have changed."""
        changed = {}
        for section, text in texts.items():
            if section in self.unlogged:
                continue
            digest, name = xxh3_64(text), f"{section}\0"
            if self.digests.get(name) != digest:
                self.digests[name] = digest
                changed[section] = text
        return changed


def known_of(
    described: Described, optimizers: Sequence[torch.optim.Optimizer], sources: dict[str, CompressedGradients],
    frozen: Collection[str],
) -> tuple[Known | None, str]:
    """What is known of a state as it is; None, and why, if changes in it cannot be told from the optimizers' steps.

    frozen  names of parameters that no optimizer has
    """
    layout, places = described.layout, described.places
    explained = np.isin(places.address, np.array(addresses_of(optimizers), np.uint64))
    apart = ~places.host_runs
    explained &= ~apart | np.isin(places.address, np.array(addresses_in_place(optimizers), np.uint64))
    unlogged = [section for section, source in sources.items() if not source.exact]
    logged = np.ones(len(places.address), np.bool_)
    if unlogged:
        logged = np.array([not is_of(name, unlogged) for name in layout.pieces.names], np.bool_)
    lazy = np.array(layout.lazy, np.bool_)
    others = np.flatnonzero(~explained & logged & ~lazy)
    names = [layout.pieces.names[at] for at in others.tolist()]
    is_far = places.device >= 0 if places.devices else np.zeros(len(places.address), np.bool_)
    odd = (apart & ~is_far)[others]
    if odd.any() or len({*names}) < len(names):  # these are not compared from step to step
        name = next((names[at] for at, is_odd in enumerate(odd.tolist()) if is_odd), "a tensor in parts")
        return None, f"'{name}' is not in one run of memory, and no optimizer explains it"
    lengths = layout.pieces.lengths()
    far = others[is_far[others]]
    if int(lengths[far].sum()) > JOURNAL_VALUE_BYTES_MAX:
        name = layout.pieces.names[far[np.argmax(lengths[far])]]
        return None, f"'{name}' and others are on a device, no optimizer explains them, and they are too large"
    others = others[~is_far[others]]
    exactness, covered = "exact", ~apart
    if places.devices:
        from flowstone.stage.fingerprints import can_digest  # imported here: most processes have no GPU

        is_run = ~np.isin(np.arange(len(places.address)), [*places.apart])
        stepped = is_far & (explained | (lazy & logged))  # others are logged
        exactness = "proven" if is_run[stepped].all() and can_digest(places) else "tolerance"
        covered = covered | (is_far & (exactness == "proven"))
    proven = np.flatnonzero((explained | (lazy & logged)) & covered)
    still = {at: layout.pieces.names[piece] for at, piece in enumerate(proven.tolist()) if not explained[piece]}
    still = {at: name for at, name in still.items() if name in frozen}
    known = Known(layout, proven, still, exactness, others, {}, {}, sources)
    if len(far):
        from flowstone.stage.far_values import FarValues, gather_values  # imported here: as above

        known.far = FarValues(far, gather_values(layout.pieces, places, far))
    for at, length in zip(others.tolist(), lengths[others].tolist(), strict=True):
        known.digests[layout.pieces.names[at]] = xxh3_64(bytes_at(int(places.address[at]), length))
    for texts in (encode_sections(described.objects), encode_sections(described.per_rank)):
        known.changed_sections(texts)
    return known, ""


def kept_of(
    known: Known, optimizers: Sequence[torch.optim.Optimizer], rows: tuple[OptimizerRow, ...], devices: Sequence[str],
    rank: int | None,
) -> Kept:
    """What a journal that begins with this state says of itself. `rank`: in a job of several."""
    pieces, stepped = known.layout.pieces, None
    proven = tuple(pieces.names[at] for at in known.proven.tolist())
    if rank is not None:
        parameters = list(map(stepped_parameters, optimizers))
        starts = np.cumsum([0, *map(len, parameters)])[:-1]
        lengths = [local(one).nbytes for of in parameters for one in of]
        boxes = [f"{pieces.names[at]} {pieces.box(at)}" for at in known.proven.tolist()]
        boxes += [known.exactness] * (known.exactness != "exact")  # fingerprints of two classes are not alike
        stepped = Stepped(
            parameter_keys(rows, pieces, rank), np.array(lengths, np.uint64), tuple(starts.tolist()),
            xxh3_64("\n".join(boxes).encode()),
        )
    sources = tuple(SourceRow(section, one.kind, one.exact) for section, one in known.sources.items())
    return Kept(known.exactness, rows, proven, environment(devices), stepped, sources)
