"""Export a study as JSON, which has everything, and as CSV, which has a row for each sample."""

from __future__ import annotations

import csv
import io
from dataclasses import fields

import msgspec

from flowstone_study.records import Cell, Sample, Study

_OF_CELL = tuple(field.name for field in fields(Cell))
_OF_SAMPLE = tuple(field.name for field in fields(Sample) if field.name != "cell")
COLUMNS = (*_OF_CELL, *_OF_SAMPLE)


def to_json(study: Study) -> str:
    return msgspec.json.format(msgspec.json.encode(study), indent=1).decode() + "\n"


def from_json(text: str) -> Study:
    """The study that a JSON text describes. Raises msgspec.ValidationError if it describes none."""
    return msgspec.json.decode(text, type=Study)


def row(sample: Sample) -> tuple[object, ...]:
    """The sample's values, in the order of COLUMNS. None for a value that was not measured."""
    return (*(getattr(sample.cell, n) for n in _OF_CELL), *(getattr(sample, n) for n in _OF_SAMPLE))


def to_csv(study: Study) -> str:
    """The study as CSV. Booleans are true and false; values that were not measured are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_plain(value) for value in row(sample)] for sample in study.samples)
    return text.getvalue()


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
