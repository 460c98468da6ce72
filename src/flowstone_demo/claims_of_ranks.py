"""The demo's claims about act four, and whether the observations confirm them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from flowstone_demo.claims import SHOWN_MAX, Claim
from flowstone_demo.curves import explained, spread, sums_explain, usual_change
from flowstone_demo.messages import Held
from flowstone_demo.rank_processes import RankRun
from flowstone_demo.sizes import RankDemoSize

_SLOT_COPIES = 3  # tensors of each parameter: the weight and AdamW's two moments
_FLOAT32 = 4
# largest difference of losses, relative to their usual change from step to step, that counts as the same training
SPREAD_MAX = 0.01


def of_ranks(form: RankDemoSize, runs: Sequence[RankRun]) -> list[Claim]:
    return [_same_training(form, runs), _naming(form, runs), _starts(runs), _bits(runs), _curve(form, runs)]


def _same_training(form: RankDemoSize, runs: Sequence[RankRun]) -> Claim:
    curves = [run.calm[0] for run in runs]
    numbers = _listed([str(run.ranks) for run in runs])
    text = f"without kills, training on {numbers} ranks differs only by rounding (the order of sums)"
    if any(set(curve) != set(range(1, form.steps + 1)) for curve in curves):
        return Claim(text, False, "some runs did not finish")
    widths, first = spread(curves), curves[0][1]
    widest, change = max(widths.values()), usual_change(curves[0])
    begun_alike = widths[1] <= sums_explain(first, form.batch * form.length)
    is_same = begun_alike and widest <= SPREAD_MAX * change and all(curve[form.steps] < curve[1] for curve in curves)
    return Claim(
        text, is_same,
        f"loss {first:.3f} -> {curves[0][form.steps]:.3f} in {form.steps} steps; the losses of the runs "
        f"differ by {widths[1]:.1e} at the first step, {widest:.1e} at most; one step changes it by {change:.1e}",
    )


def _naming(form: RankDemoSize, runs: Sequence[RankRun]) -> Claim:
    """The claim that the errors of the remaining ranks name the killed ranks, and no others."""
    first = runs[0]
    survivors = set(range(first.ranks)) - set(first.killed)
    named = [rank for rank, words in first.lost.items() if re.findall(r"\brank (\d+)", words) == [str(form.victim)]]
    errors = "; ".join(sorted(set(first.lost.values())))
    return Claim(
        f"rank {form.victim} of {first.ranks} was killed as it began to save; the errors of all other ranks name it",
        first.killed == (form.victim,) and set(named) == survivors, f"{len(named)} of {len(survivors)}: {errors}",
    )


def _starts(runs: Sequence[RankRun]) -> Claim:
    wrong = [run.ranks for run in runs if set(run.resumed.values()) != {run.newest} or len(run.resumed) != run.ranks]
    promised, below = 0, []
    for run in runs:
        if (run.newest or 0) < promised:
            below.append(run.ranks)
        promised = max(promised, *run.committed, 0)
    starts = "; ".join(
        f"{run.ranks}: {'fresh' if run.newest is None else f'from step {run.newest}'}" for run in runs
    )
    right = not wrong and not below and all(run.newest is not None for run in runs[1:]) and runs[0].newest is None
    return Claim(
        "every start was from the newest committed step, the same on all ranks", right,
        f"ranks {starts}" + (f"; wrong on {wrong + below}" if wrong or below else ""),
    )


def _bits(runs: Sequence[RankRun]) -> Claim:
    """The claim that the memory of each rank after a load is bit-identical to that of the ranks that saved the step."""
    text = "weights, moments and all other values after each load equal the saved ones, bit for bit"
    differences, comparisons = [], []
    for position, run in enumerate(runs):
        if run.newest is None:
            continue
        earlier = reversed(runs[:position])
        saved = next((before.saved[run.newest] for before in earlier if run.newest in before.saved), [])
        unlike = _unlike([*saved, *run.loaded])
        tensors = run.loaded[0]
        size = sum(tensor.bytes for tensor in tensors.values())
        if size < _FLOAT32 * _SLOT_COPIES * run.began[0].parameters or not saved:
            unlike.append("some digests are missing")
        differences += [f"{name} on {run.ranks}" for name in unlike]
        comparisons.append(
            f"{len(saved)} -> {run.ranks} ranks, step {run.newest}: {len(tensors)} SHA-256 over {size:,} bytes"
        )
    if differences or len(comparisons) < len(runs) - 1:
        more = f" and {len(differences) - SHOWN_MAX} more" if len(differences) > SHOWN_MAX else ""
        return Claim(text, False, f"different: {', '.join(differences[:SHOWN_MAX])}{more}")
    return Claim(text, True, "; ".join(comparisons))


def _unlike(sides: Sequence[Mapping[str, Held]]) -> list[str]:
    """The names that are missing in one of the mappings, or have different digests."""
    names = dict.fromkeys(name for side in sides for name in side)
    digests_of = {name: {side[name].sha256 if name in side else None for side in sides} for name in names}
    return [name for name, digests in digests_of.items() if len(digests) != 1]


def _curve(form: RankDemoSize, runs: Sequence[RankRun]) -> Claim:
    """The claim on losses: every loss of every rank, also of repeated steps, agrees with the undisturbed run on the
    first number of ranks.
    """
    reference = [run.calm[0] for run in runs]
    reached, beyond, worst = set[int](), [], (0.0, 0.0, 0)
    for changes, run in enumerate(runs):
        allowed = explained(reference, changes, form.batch * form.length)
        for curve in run.losses:
            reached |= set(curve)
            for step, loss in curve.items():
                off = abs(loss - reference[0].get(step, float("inf")))
                worst = max(worst, (off, allowed.get(step, 0.0), step))
                if not off <= allowed.get(step, 0.0):
                    beyond.append(step)
    off, limit, worst_step = worst
    first = runs[0].losses[0]
    alike = sum(loss == reference[0].get(step) for step, loss in first.items())
    return Claim(
        "the loss curve differs only by rounding (the order of sums)",
        reached == set(range(1, form.steps + 1)) and not beyond,
        f"{alike} of {len(first)} steps on {runs[0].ranks} ranks equal bit for bit; then at most {off:.1e} off, at "
        f"step {worst_step}, where rounding explains {limit:.1e}"
        + (f"; more than explained at {sorted(set(beyond))[:SHOWN_MAX]}" if beyond else ""),
    )


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
