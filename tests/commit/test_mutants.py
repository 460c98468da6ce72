"""Checkpoints from an untrusted source: any document is read, or refused by one of our errors.

Each seed draws some of all mutants (tests/support/mutants.py); `make soak` tries many more.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import flowstone as fs
import mutants
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import decode_manifest
from flowstone.format.segment import parse_header
from mutants import DOCUMENTS, fresh_copy, mutants_of, put, spliced, text_of, trouble_with

SHARE_STRUCTURAL = 0.7  # of mutants; the others are spliced


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("mutants") / "run"
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, mutants.state())
    return store


def _campaign(original: Path, target: Path, seed: int, number: int) -> None:
    rng = random.Random(seed)
    source = next(original.glob("step-*"))
    texts = {document: text_of(source, document) for document in (*DOCUMENTS, "index")}
    structural = {document: mutants_of(texts[document]) for document in DOCUMENTS}
    for index in range(number):
        checkpoint = fresh_copy(original, target)
        if rng.random() < SHARE_STRUCTURAL:
            document = rng.choice(DOCUMENTS)
            text = rng.choice(structural[document])()
        else:
            document = rng.choice((*DOCUMENTS, "index"))
            text = spliced(texts[document], rng)
        put(checkpoint, document, text)
        assert trouble_with(checkpoint) == [], f"mutant {index} of seed {seed}, of {document}: {text[:2000]!r}"


def test_what_is_not_changed_is_read(original: Path, tmp_path: Path) -> None:
    checkpoint = fresh_copy(original, tmp_path / "run")
    assert trouble_with(checkpoint) == []
    assert fs.open(checkpoint).verify().sound
    for document in DOCUMENTS:
        put(checkpoint, document, mutants.dump(mutants.parse(text_of(checkpoint, document))))
        fs.open(checkpoint).check()


@pytest.mark.parametrize("seed", range(5))
def test_a_mutant_is_read_or_refused_by_an_error_of_ours(original: Path, tmp_path: Path, seed: int) -> None:
    _campaign(original, tmp_path / "run", seed, 100)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_more_mutants_are_read_or_refused_by_an_error_of_ours(original: Path, tmp_path: Path, seed: int) -> None:
    _campaign(original, tmp_path / "run", seed, 400)


def test_every_mutant_of_a_manifest_and_of_headers_is_parsed_or_refused(original: Path) -> None:
    """All of them, by their parsers alone; one in seven of the headers'."""
    checkpoint = next(original.glob("step-*"))
    for mutant in mutants_of(text_of(checkpoint, "manifest.json"))[::3]:
        text = mutant()
        _parsed_or_refused(lambda text=text: decode_manifest(mutants.sealed_text(text), path="manifest.json"), text)
    for document in ("index header", "segment header"):
        for mutant in mutants_of(text_of(checkpoint, document))[::7]:
            text = mutant()
            header = len(text).to_bytes(8, "little") + text
            _parsed_or_refused(lambda header=header: parse_header(header, path="a file"), text)


def _parsed_or_refused(parse: object, text: bytes) -> None:
    try:
        parse()  # type: ignore[operator]
    except FlowstoneError:
        pass
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} of {text[:2000]!r}") from error
