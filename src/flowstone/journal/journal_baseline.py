"""The state that the next journal frame builds on."""

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
from flowstone.journal.journal_format import OptimizerRow, SourceRow
from flowstone.journal.journal_frames import FrameTensor, bytes_at
from flowstone.journal.journal_ranks import SteppedParameters
from flowstone.journal.journal_records import JournalMetadata
from flowstone.state import StateDescription
from flowstone.table.pieces import Layout
from flowstone.torch.compressed import CompressedGradients, belongs_to, find_gradient_sources
from flowstone.torch.stepped_tensors import (
    addresses_in_place,
    addresses_of,
    environment,
    local_tensor,
    parameter_keys,
    stepped_parameters,
)

if TYPE_CHECKING:
    import torch

    from flowstone.journal.device_values import DeviceValues
    from flowstone.journal.optimizer_steps import OptimizerStepRecord


class JournalBaseline(msgspec.Struct):
    """A state that a journal continues from.

    layout         layout of the state; the next step must have the same
    proven         positions of the pieces (parts of tensors) that have fingerprints (digests that a replay compares):
                   pieces that only optimizer steps change, and frozen ones
    frozen_names   names of the frozen pieces, by position in `proven`
    exactness      exactness of replays that continue from this state: see journal_format.JournalHeader
    others         positions of other pieces in host memory
    digests        digests of these pieces, and of sections, when they were last written
    options        settings of each optimizer, when they were last written
    sources        sources of compressed gradients (objects that decompress them), by section
    device_values  other pieces on devices; None: there are none
    """

    layout: Layout
    proven: NDArray[np.int64]
    frozen_names: dict[int, str]
    exactness: str
    others: NDArray[np.int64]
    digests: dict[str, int]
    options: dict[int, tuple[msgspec.Raw, ...]]
    sources: dict[str, CompressedGradients]
    device_values: DeviceValues | None = None

    @property
    def unlogged(self) -> tuple[str, ...]:
        """The sections of the state whose tensors the journal does not log. A replay approximates them
        (`CompressedGradients.replayed`).
        """
        return tuple(section for section, source in self.sources.items() if not source.exact)

    def other_sources(self, state: Mapping[str, object]) -> str:
        """Why the sources of compressed gradients in `state` are not those of the baseline; "" if they are the same."""
        own = find_gradient_sources(state)
        if not self.sources and not own:
            return ""
        same = {section: id(source) for section, source in own.items()}
        changed = same != {section: id(source) for section, source in self.sources.items()}
        return "the objects that decompress gradients have changed" if changed else ""

    def note_options(self, records: Sequence[OptimizerStepRecord]) -> list[bool]:
        """For each of these optimizer steps: whether the optimizer's settings are the ones that the journal has
        already.
        """
        repeats = []
        for record in records:
            repeats.append(self.options.get(record.optimizer) == record.options)
            self.options[record.optimizer] = record.options
        return repeats

    def changed_values(self, described: StateDescription) -> tuple[dict[str, FrameTensor], str]:
        """Returns copies of the host tensors that were changed, but not by an optimizer's step; and why they cannot be
        logged ("" if they can).
        """
        places, pieces, total = described.places, described.pieces, 0
        values: dict[str, FrameTensor] = {}
        lengths = pieces.lengths()
        for row in self.others.tolist():
            length, piece = int(lengths[row]), pieces[row]
            view = bytes_at(int(places.address[row]), length)
            digest = xxh3_64(view)
            if self.digests.get(piece.name) == digest:
                continue
            total += length
            if total > JOURNAL_VALUE_BYTES_MAX:
                return {}, f"'{piece.name}' was changed by no optimizer, and is too large for the journal"
            self.digests[piece.name] = digest
            copy = FrameTensor.of_bytes(bytes(view))
            values[piece.name] = msgspec.structs.replace(copy, dtype=piece.dtype.name, shape=piece.box.shape)
        return values, ""

    def changed_device_values(self, described: StateDescription) -> Callable[[], dict[str, FrameTensor]]:
        """Start to gather the device tensors that were changed, but not by an optimizer's step. The returned function
        waits for their values. For one thread at a time.
        """
        if self.device_values is None:
            return dict
        from flowstone.journal.device_values import gather_values  # imported here: most processes have no GPU

        values = self.device_values
        return partial(values.changed, gather_values(described.pieces, described.places, values.rows))

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


def baseline_of(
    described: StateDescription, optimizers: Sequence[torch.optim.Optimizer], sources: dict[str, CompressedGradients],
    frozen: Collection[str],
) -> tuple[JournalBaseline | None, str]:
    """Returns the current state as the one that the next journal builds on, and "". Returns None and the reason, if
    changes of the state outside of optimizer steps could not be detected.

    frozen  names of parameters that are in no optimizer
    """
    layout, places = described.layout, described.places
    explained = np.isin(places.address, np.array(addresses_of(optimizers), np.uint64))
    apart = ~places.host_runs
    explained &= ~apart | np.isin(places.address, np.array(addresses_in_place(optimizers), np.uint64))
    unlogged = [section for section, source in sources.items() if not source.exact]
    logged = np.ones(len(places.address), np.bool_)
    if unlogged:
        logged = np.array([not belongs_to(name, unlogged) for name in layout.pieces.names], np.bool_)
    lazy = np.array(layout.lazy, np.bool_)
    others = np.flatnonzero(~explained & logged & ~lazy)
    names = [layout.pieces.names[row] for row in others.tolist()]
    is_far = places.device >= 0 if places.devices else np.zeros(len(places.address), np.bool_)
    odd = (apart & ~is_far)[others]
    if odd.any() or len({*names}) < len(names):  # such pieces (parts of tensors) cannot be compared from step to step
        name = next((names[row] for row, is_odd in enumerate(odd.tolist()) if is_odd), "a tensor in parts")
        return None, f"'{name}' is not contiguous in memory, and no optimizer updates it"
    lengths = layout.pieces.lengths()
    far = others[is_far[others]]
    if int(lengths[far].sum()) > JOURNAL_VALUE_BYTES_MAX:
        name = layout.pieces.names[far[np.argmax(lengths[far])]]
        return None, f"'{name}' and others on a device, which no optimizer updates, are too large for the journal"
    others = others[~is_far[others]]
    exactness, covered = "exact", ~apart
    if places.devices:
        from flowstone.journal.fingerprints import can_digest  # imported here: most processes have no GPU

        is_run = ~np.isin(np.arange(len(places.address)), [*places.strided])
        stepped = is_far & (explained | (lazy & logged))  # the other device tensors are logged
        exactness = "proven" if is_run[stepped].all() and can_digest(places) else "tolerance"
        covered = covered | (is_far & (exactness == "proven"))
    proven = np.flatnonzero((explained | (lazy & logged)) & covered)
    unstepped = [(position, piece) for position, piece in enumerate(proven.tolist()) if not explained[piece]]
    names_there = {position: layout.pieces.names[piece] for position, piece in unstepped}
    frozen_names = {position: name for position, name in names_there.items() if name in frozen}
    device_values = None
    if len(far):
        from flowstone.journal.device_values import DeviceValues, gather_values  # imported here: as above

        device_values = DeviceValues(far, gather_values(layout.pieces, places, far))
    baseline = JournalBaseline(layout, proven, frozen_names, exactness, others, {}, {}, sources, device_values)
    for row, length in zip(others.tolist(), lengths[others].tolist(), strict=True):
        baseline.digests[layout.pieces.names[row]] = xxh3_64(bytes_at(int(places.address[row]), length))
    for texts in (encode_sections(described.objects), encode_sections(described.per_rank)):
        baseline.changed_sections(texts)
    return baseline, ""


def metadata_of(
    baseline: JournalBaseline, optimizers: Sequence[torch.optim.Optimizer], rows: tuple[OptimizerRow, ...],
    devices: Sequence[str], rank: int | None,
) -> JournalMetadata:
    """The metadata of a journal that builds on the state `baseline`. `rank`: None in a job of one rank."""
    pieces, stepped = baseline.layout.pieces, None
    proven = tuple(pieces.names[row] for row in baseline.proven.tolist())
    if rank is not None:
        parameters = list(map(stepped_parameters, optimizers))
        starts = np.cumsum([0, *map(len, parameters)])[:-1]
        lengths = [local_tensor(parameter).nbytes for group in parameters for parameter in group]
        boxes = [f"{pieces.names[row]} {pieces.box(row)}" for row in baseline.proven.tolist()]
        # fingerprints can be compared only between journals of the same exactness
        boxes += [baseline.exactness] * (baseline.exactness != "exact")
        stepped = SteppedParameters(
            parameter_keys(rows, pieces, rank), np.array(lengths, np.uint64), tuple(starts.tolist()),
            xxh3_64("\n".join(boxes).encode()),
        )
    sources = tuple(SourceRow(section, source.kind, source.exact) for section, source in baseline.sources.items())
    return JournalMetadata(baseline.exactness, rows, proven, environment(devices), stepped, sources)
