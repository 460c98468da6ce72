"""The demo's claims about acts one to three, and five, and whether the observations confirm them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowstone_demo.compare import Compared
from flowstone_demo.every_step import EveryStepRun
from flowstone_demo.kill_loop import KilledRun
from flowstone_demo.messages import Finished
from flowstone_demo.run_log import RunLog
from flowstone_demo.sizes import DemoSize


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about Flowstone, whether it held, and what was observed."""

    text: str
    held: bool
    observed: str


# section of the state -> what the output calls it
_WORDS = {
    "model": "weights", "optimizer": "AdamW's moments", "rng": "generators of torch, numpy and python",
    "loader": "loader and its generator", "losses": "loss curve", "scheduler": "learning-rate schedule", "step": "step",
}
_FLOAT32 = 4
SHOWN_MAX = 3


def of_reference(form: DemoSize, seen: RunLog) -> list[Claim]:
    losses = [step.loss for step in seen.steps]
    complete = [step.step for step in seen.steps] == list(range(1, form.steps + 1))
    tenth = max(1, form.steps // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    return [Claim("the loss fell", complete and last < first, f"loss {first:.3f} -> {last:.3f} in {len(losses)} steps")]


def of_kill_loop(form: DemoSize, reference: RunLog, seen: KilledRun) -> list[Claim]:
    expected = {step.step: step.loss for step in reference.steps}
    unlike = [step.step for step in seen.run_log.steps if expected.get(step.step) != step.loss]
    wrong = [resume for resume in seen.resumes if not resume.right]
    again = len(seen.run_log.steps) - len({step.step for step in seen.run_log.steps})
    reached = {step.step for step in seen.run_log.steps} == set(expected)
    kills, torn = len(seen.kills), len(seen.torn)
    inside = sum(bool(kill.torn) for kill in seen.kills)
    starts = ", ".join("fresh" if resume.step is None else str(resume.step) for resume in seen.resumes)
    return [
        Claim(f"killed {form.kills_min} times or more", kills >= form.kills_min, f"{kills} times by SIGKILL"),
        Claim(
            f"{form.torn} kills or more fell inside a save", inside >= form.torn,
            f"{inside} of {kills} left {torn} torn saves",
        ),
        Claim(
            "every start was from the newest committed step, and none before a step reported as committed",
            not wrong and len(seen.resumes) == kills + 1,
            f"starts: {starts}" + (f"; wrong: {wrong[:SHOWN_MAX]}" if wrong else ""),
        ),
        Claim(
            "every step, also if repeated, had the loss of the undisturbed run, bit for bit", reached and not unlike,
            f"{len(seen.run_log.steps)} steps reported, {again} of them repeated"
            + (f"; different at {unlike[:SHOWN_MAX]}" if unlike else ""),
        ),
    ]


def of_comparison(form: DemoSize, reference: RunLog, seen: RunLog, compared: Mapping[str, Compared]) -> list[Claim]:
    parameters = reference.began[0].parameters
    least_bytes = {"model": parameters * _FLOAT32, "optimizer": 2 * parameters * _FLOAT32}
    least_values = {"losses": form.steps, "step": 1, "scheduler": 1, "loader": 1, "rng": 1}
    claims = []
    for section, words in _WORDS.items():
        part = compared.get(section, Compared(section, 0, 0, 0, ("absent from both",)))
        enough = part.bytes >= least_bytes.get(section, 0) and part.values >= least_values.get(section, 0)
        claims.append(Claim(f"{words} equal on disk", enough and not part.differences, _shown(part)))
    strange = sorted(compared.keys() - _WORDS.keys())
    if strange:
        claims.append(Claim("nothing else in the checkpoints", False, ", ".join(strange)))
    left, right = reference.finished, seen.finished
    alike = left is not None and left == right
    claims.append(Claim("equal in memory, by SHA-256 computed without Flowstone", alike, _ends(left, right)))
    return claims


def of_every_step(form: DemoSize, reference: RunLog, seen: EveryStepRun) -> list[Claim]:
    expected = {step.step: step.loss for step in reference.steps}
    steps = seen.run_log.steps
    unlike = [step.step for step in steps if expected.get(step.step) != step.loss]
    reached = {step.step for step in steps} == set(expected)
    wrong = [restart for restart in seen.restarts if not restart.right]
    lost = sum(restart.lost for restart in seen.restarts)
    end, left = seen.run_log.finished, reference.finished
    durable = {step.step for step in seen.run_log.journaled} | {save.step for save in seen.run_log.saves}
    return [
        Claim(f"killed {form.journal_kills} times at random instants", seen.kills >= form.journal_kills,
              f"{seen.kills} times by SIGKILL; {len(durable)} of {form.steps} steps were reported durable"),
        Claim("each kill lost at most the step in progress", not wrong and len(seen.restarts) == seen.kills + 1,
              f"{seen.kills} kills lost {lost} of {form.steps} saved steps"
              + (f"; wrong: {wrong[:SHOWN_MAX]}" if wrong else "")),
        Claim("every step, also if repeated, had the loss of the undisturbed run, bit for bit", reached and not unlike,
              f"{len(steps)} steps" + (f"; different at {unlike[:SHOWN_MAX]}" if unlike else "")),
        Claim("the final state equals that of the undisturbed run, by SHA-256 computed without Flowstone",
              end is not None and end == left, _ends(end, left)),
        Claim("a replay of the journal loads that state, too", seen.reloaded is not None and seen.reloaded == left,
              _ends(seen.reloaded, left)),
    ]


def _ends(*ends: Finished | None) -> str:
    digests = " against ".join(sorted({end.sha256[:16] if end else "none" for end in ends}))
    return digests + (f" over {ends[0].bytes:,} bytes of tensors and other values" if ends[0] else "")


def _shown(part: Compared) -> str:
    if not part.differences:
        tensors = [f"{part.tensors} tensor{'s' * (part.tensors != 1)} of {part.bytes:,} bytes"] if part.tensors else []
        values = [f"{part.values} value{'s' * (part.values != 1)}"] if part.values else []
        return " and ".join(tensors + values)
    more = f" and {len(part.differences) - SHOWN_MAX} more" if len(part.differences) > SHOWN_MAX else ""
    return "; ".join(part.differences[:SHOWN_MAX]) + more
