"""With any optimizer, scheduler and flow, a run resumes bit for bit as from torch.save, or is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from resumes import FLOWS, OPTIMIZERS, SCHEDULERS, SETTINGS, Case, cases, outcome, sample

_SAMPLE, _SEED = 300, 20
_ENDS = ("equal", "refused: ", "torch ", "reads without")


def check(case: Case, path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of schedulers and of its own checkpoints
        name = outcome(case, path)
    assert name.startswith(_ENDS), f"{case}: {name}"
    return name


def test_a_sample_of_the_matrix_resumes_as_from_torch_save(tmp_path: Path) -> None:
    chosen = sample(_SEED, _SAMPLE)
    for field, values in enumerate((OPTIMIZERS, SCHEDULERS, SETTINGS, FLOWS)):
        assert {case[field] for case in chosen} == set(values)
    actual = [check(case, tmp_path / str(i)) for i, case in enumerate(chosen)]
    assert sum(name.startswith("equal") for name in actual) > 0.8 * _SAMPLE, "few say nothing"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_resumes_from_objects_or_is_refused_at_save(tmp_path: Path, optimizer: str) -> None:
    expected = "refused: cannot describe" if optimizer == "Lookahead" else "equal"  # its form is its own
    for live in (False, True):
        assert check(Case(optimizer, "none", "plain", "objects", live), tmp_path / str(live)).startswith(expected)


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_of_the_matrix_resumes_as_from_torch_save(tmp_path: Path, optimizer: str) -> None:
    for i, case in enumerate(case for case in cases() if case.optimizer == optimizer):
        check(case, tmp_path / str(i))
