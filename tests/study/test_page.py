"""JSON, CSV and page of a study have the same figures, and the page needs no other file."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from flowstone.config import KIB, MIB
from flowstone_study.export import COLUMNS, from_json, row, to_csv, to_json
from flowstone_study.figures import figures
from flowstone_study.page import to_html
from flowstone_study.planning import plan, quick_scope
from flowstone_study.records import MIXES, Cell, Probe, Sample, Study
from flowstone_study.summary import best, cell_label, size_label, summarise

BASE = Cell(direction="write", bytes=64 * MIB)
PLAN = plan(BASE, quick_scope(BASE.bytes, 4, MIXES))


class Reader(HTMLParser):
    """Tags in order, what every address leads to, the table of samples, and the titles of marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [f"{name}={value}" for name, value in attrs if name in ("href", "src", "action")]
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "data":
            self.rows[-1][-1] = dict(attrs)["value"] or ""
        elif tag == "title" and "svg" in self.open:
            self.titles.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes what is not open"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data
        elif self.open[-1:] == ["title"] and "svg" in self.open:
            self.titles[-1] += data


def sample(cell: Cell, round: int, row: int) -> Sample:
    if cell.memory == "registered":
        return Sample(cell=cell, round=round, error="ENOMEM: Cannot <allocate> & lock")
    seconds = 0.05 + row * 0.0007 + round * 0.001
    cold = None if cell.direction == "write" else row % 2 == 0
    return Sample(
        cell=cell, round=round, seconds=seconds, gb_per_s=cell.bytes / 1e9 / seconds, cpu_s_per_gb=0.01 * (1 + row % 7),
        requests=cell.bytes // cell.request_bytes, files=1, cold=cold, engine=cell.engine,
    )


@pytest.fixture(scope="module")
def study() -> Study:
    samples = [sample(cell, number, index) for number in (1, 2) for index, cell in enumerate(PLAN.cells)]
    probe = Probe(
        file_system="ext4", kernel="Linux 6.18", io_uring_error=None, direct_alignment=512, registered_bytes=64 * MIB,
        registered_error="Cannot allocate memory", memlock_bytes=64 * KIB,
    )
    return Study(
        flowstone="0.1.0", path="/scratch/<runs> & more", started="2026-01-01T00:00:00+00:00", seconds=12.5,
        machine={"CPU": "some CPU", "kernel": "Linux 6.18"}, probe=probe, quick=True, rounds=2, bytes=BASE.bytes,
        samples=tuple(samples),
    )


@pytest.fixture(scope="module")
def page(study: Study) -> str:
    return to_html(study, PLAN, summarise(study.samples))


def test_json_gives_the_study_back(study: Study) -> None:
    assert from_json(to_json(study)) == study


def test_csv_has_a_row_for_each_sample(study: Study) -> None:
    head, *rows = csv.reader(io.StringIO(to_csv(study)))
    assert tuple(head) == COLUMNS
    assert len(rows) == len(study.samples)
    for text, sample in zip(rows, study.samples, strict=True):
        values = ["" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in row(sample)]
        assert text == values


def test_page_holds_every_sample_as_json_and_csv_do(study: Study, page: str) -> None:
    head, *rows = Reader(page).rows
    assert [name.replace(" ", "_") for name in head] == list(COLUMNS)
    (_, *of_csv) = csv.reader(io.StringIO(to_csv(from_json(to_json(study)))))
    assert rows == of_csv


def test_page_draws_every_cell_of_its_figures(study: Study, page: str) -> None:
    titles = "\n".join(Reader(page).titles)
    summary = summarise(study.samples)
    drawn = {entry.cell for f in figures(PLAN, summary) for p in f.panels for g in p.groups for entry in g.entries}
    assert drawn - {None} == set(PLAN.cells)
    for cell in PLAN.cells:
        assert cell_label(cell) in titles
    assert titles.count("not measured") == 2 * len(
        [c for c in PLAN.engines if c.memory == "registered"]
    ) + len([c for c in PLAN.pages if c.memory == "registered"])


def test_page_needs_nothing_but_itself(page: str) -> None:
    reader = Reader(page)
    assert reader.open == []
    assert reader.addresses == []
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "foreignobject"}
    assert not re.search(r"url\(|@import|https?:|//", page.replace("</", ""))
    assert reader.tags >= {"svg", "table", "details", "h1"}


def test_page_escapes_what_it_is_given(page: str) -> None:
    assert "/scratch/&lt;runs&gt; &amp; more" in page
    assert "<runs>" not in page
    assert "Cannot &lt;allocate&gt; &amp; lock" in page


def test_page_names_machine_best_and_refusals(study: Study, page: str) -> None:
    top = best(summarise(study.samples), "write", study.bytes)
    assert top is not None
    assert cell_label(top.cell) in page
    assert f"{top.gb_per_s:.2f}" in page
    assert "some CPU" in page
    refused = len({s.cell for s in study.samples if s.error})
    assert f"{refused} of {len(PLAN.cells)} cells not measured" in page


def test_summary_takes_medians_and_keeps_refusals_apart() -> None:
    cell, other = BASE, replace(BASE, queue_depth=1)
    rates = [(1, 2.0), (2, 6.0), (3, 3.0)]
    samples = [Sample(cell=cell, round=r, seconds=1.0, gb_per_s=v, cpu_s_per_gb=0.1) for r, v in rates]
    actual = summarise([*samples, Sample(cell=other, round=1, error="EINVAL"), Sample(cell=cell, round=4, error="EIO")])
    assert (actual.measured[cell].gb_per_s, actual.measured[cell].low, actual.measured[cell].high) == (3.0, 2.0, 6.0)
    assert actual.refused == {other: "EINVAL"}
    assert actual.spread == pytest.approx(4 / 3)


def test_best_ignores_cells_that_moved_fewer_bytes() -> None:
    small = replace(BASE, bytes=8 * MIB)
    rates = ((BASE, 1.0), (small, 9.0))
    samples = [Sample(cell=cell, round=1, seconds=1.0, gb_per_s=rate, cpu_s_per_gb=0.1) for cell, rate in rates]
    actual = best(summarise(samples), "write", BASE.bytes)
    assert actual is not None
    assert actual.cell == BASE
    assert best(summarise(samples), "restore", BASE.bytes) is None


@pytest.mark.parametrize(("count", "label"), [(4096, "4 KiB"), (MIB, "1 MiB"), (3 << 29, "1.5 GiB"), (512, "512 B")])
def test_sizes_are_told_in_powers_of_two(count: int, label: str) -> None:
    assert size_label(count) == label
