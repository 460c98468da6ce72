"""The demo's five acts, in order, and whether all claims held."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import structs
from rich.console import Console

import flowstone as fs
from flowstone_demo import across, claims, claims_of_ranks
from flowstone_demo.child_process import ChildProcess, DiedError
from flowstone_demo.claims import Claim
from flowstone_demo.compare import compare
from flowstone_demo.every_step import EveryStepRun, run_every_step
from flowstone_demo.kill_loop import LISTEN_S, KilledRun, kill_loop
from flowstone_demo.messages import Order, RankOrder
from flowstone_demo.run_log import RunLog
from flowstone_demo.screen import Screen, every_step_table, saves_table, torn_line
from flowstone_demo.sizes import FULL, FULL_RANKS, SMALL, SMALL_RANKS, DemoSize, RankDemoSize

SEED_BITS = 31  # torch accepts 64 bits, but smaller seeds are easier to read
VERB_MAX_S = 120.0


def run(
    *, directory: Path | None = None, seed: int | None = None, keep: bool = False, small: bool = False,
    flip_bit: bool = False, console: Console | None = None, judged: list[Claim] | None = None,
) -> int:
    """Run the demo. Returns the exit status: 0 if every claim held, 1 if not, 2 if the demo could not start.

    directory  an empty or new directory to work in; by default a new one in `runs/` of the current directory
    seed       seed of the training and of the kills; by default a new one, which is printed
    keep       whether to keep stores and logs at the end; otherwise everything is removed
    small      for tests: tiny models and few kills, so that the demo takes half a minute instead of four minutes
    flip_bit   for tests: flip one bit of one weight, at the end of acts two and five, and after each load of act four.
               The demo must then fail
    console    where the output is printed; by default on standard output
    judged     a list to which every claim is appended, with its result

    Starts processes (in act four several at a time), and ends all of them before it returns.
    """
    form, ranks = (SMALL, SMALL_RANKS) if small else (FULL, FULL_RANKS)
    screen = Screen(console or Console(highlight=False))
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    started = time.monotonic()
    verdicts = [] if judged is None else judged
    made = [parent for parent in (Path("runs"),) if directory is None and not parent.exists()]
    try:
        work = _workplace(directory, form)
    except OSError as error:
        verdicts.append(Claim("the demo started", False, str(error)))
        screen.claim(verdicts[-1])
        return 2
    try:
        _show(screen, work, form, ranks, seed=seed, flip_bit=flip_bit, verdicts=verdicts)
    except (DiedError, fs.FlowstoneError) as error:
        verdicts.append(Claim("the demo finished", False, str(error)))
        screen.claim(verdicts[-1])
    finally:
        screen.still()
        if not keep:
            _clear(work, made)
    seconds = time.monotonic() - started
    screen.act(
        f"{sum(claim.held for claim in verdicts)} of {len(verdicts)} claims held, in {seconds:.0f} s (seed {seed})",
        f"stores and logs are in {work}" if keep else "all its files were removed",
    )
    return 0 if all(claim.held for claim in verdicts) else 1


def _show(
    screen: Screen, work: Path, form: DemoSize, ranks: RankDemoSize, *, seed: int, flip_bit: bool, verdicts: list[Claim]
) -> None:
    """Run the five acts. Every claim is appended to `verdicts` once it is known whether it held."""

    def judge(new_claims: list[Claim]) -> None:
        for claim in new_claims:
            screen.claim(claim)
        verdicts.extend(new_claims)

    calm = Order(form=form, seed=seed, store=str(work / "reference"), scratch=str(work), save_every=None)
    killed_order = Order(
        form=form, seed=seed, store=str(work / "killed"), scratch=str(work), save_every=form.save_every,
        torch_saves=form.torch_saves, flip_bit=flip_bit,
    )

    screen.act("Act one: an undisturbed run", f"{form.steps} steps, with a save only at the end; seed {seed}")
    reference = _act_one(screen, calm, work / "reference.log")
    judge(claims.of_reference(form, reference))

    screen.act(
        "Act two: the same run, killed again and again",
        f"a save every {form.save_every} steps, and each new process resumes from the newest committed one",
    )
    seen = kill_loop(killed_order, work / "killed.log", _Watch(screen, form).show)
    judge(claims.of_kill_loop(form, reference, seen))

    screen.act("Act three: are they equal?", "the last checkpoints and the memory of both processes, bit for bit")
    compared = compare(fs.open(calm.store), fs.open(killed_order.store))
    judge(claims.of_comparison(form, reference, seen.run_log, compared))

    fewer = RankOrder(form=ranks, seed=seed, store=str(work / "across"), flip_bit=flip_bit)
    judge(_act_four(screen, fewer, work))

    every_step_order = structs.replace(
        killed_order, store=str(work / "every-step"), save_every=1, torch_saves=0, every_step=True
    )
    screen.act(
        "Act five: a durable checkpoint of every step",
        f"the run of act one, killed {form.journal_kills} times; gradients of each step go into a journal, and a load "
        "replays them",
    )
    each = run_every_step(every_step_order, work / "every-step.log", _Restarts(screen, form).show)
    judge(claims.of_every_step(form, reference, each))

    screen.act("The cost", "measured in this run, beside torch.save of the same state with fsync of file and directory")
    screen.table(saves_table(seen.run_log.saves, seen.run_log.torch_saves))
    screen.table(every_step_table(reference, each.run_log))
    judge(_verbs(screen, killed_order.store))


def _act_one(screen: Screen, order: Order, log: Path) -> RunLog:
    """Train as `order` says, without kills. Raises DiedError if the process ends early."""
    run_log = RunLog()
    screen.live("starting the training process")
    with ChildProcess(order, log) as process:
        while not process.over:
            for message in process.receive(LISTEN_S):
                run_log.enter(message)
                screen.live(run_log.line(order.form.steps))
        process.end()
    if run_log.finished is None or not run_log.began:
        raise DiedError("the training process ended without an error, but before its last step")
    screen.still()
    parameters, state_bytes = run_log.began[0].parameters, run_log.finished.bytes
    screen.say(f"{parameters / 1e6:.1f} million parameters, a state of {state_bytes / 1e6:.0f} MB")
    return run_log


def _act_four(screen: Screen, order: RankOrder, work: Path) -> list[Claim]:
    """Train on several ranks, kill them, and load on fewer. Returns the claims. Raises DiedError."""
    form = order.form
    screen.act(
        f"Act four: saved on {form.ranks[0]} ranks, loaded on {form.ranks[1]}, then on {form.ranks[2]}",
        f"FSDP2 over gloo; {form.steps} steps, a save every {form.save_every}; "
        "then the same without kills",
    )
    if not across.runs_here():
        screen.say("skipped: FSDP2 of this torch needs GPUs; install a later torch")
        return []
    runs = []
    for run in across.rank_runs(order, work, screen.live):
        screen.say(across.told(run, form))
        runs.append(run)
    screen.still()
    return claims_of_ranks.of_ranks(form, runs)


class _Watch:
    """Shows act two while it runs: a line that changes, and a line for each kill and each start."""

    def __init__(self, screen: Screen, form: DemoSize) -> None:
        self._screen, self._form = screen, form
        self._kills = self._starts = 0

    def show(self, seen: KilledRun) -> None:
        for resume in seen.resumes[self._starts :]:
            newest = "nothing" if resume.newest is None else f"step {resume.newest}"
            source = "fresh" if resume.step is None else f"from step {resume.step}"
            self._screen.say(f"start {len(seen.kills) + 1}: {source}; newest committed on disk: {newest}")
        for kill in seen.kills[self._kills :]:
            newest = "no step" if kill.newest is None else f"step {kill.newest}"
            place = "inside a save" if kill.torn else "between saves"
            self._screen.say(
                f"kill {kill.number}: process {kill.pid} {place}, step {kill.during_step} done, {newest} committed"
            )
            for torn in kill.torn:
                self._screen.say("  " + torn_line(torn))
        self._starts, self._kills = len(seen.resumes), len(seen.kills)
        line = f"{seen.run_log.line(self._form.steps)}   kills {len(seen.kills)}   torn {len(seen.torn)}"
        self._screen.live(line)


class _Restarts:
    """Shows act five while it runs: a line that changes, and a line for each start."""

    def __init__(self, screen: Screen, form: DemoSize) -> None:
        self._screen, self._form, self._shown = screen, form, 0

    def show(self, seen: EveryStepRun) -> None:
        for restart in seen.restarts[self._shown :]:
            killed = f"killed with step {restart.returned} saved; " if restart.returned else ""
            source = f"from step {restart.step}" if restart.step else "fresh"
            self._screen.say(f"{killed}start {self._shown + 1}: {source}")
            self._shown += 1
        self._screen.live(seen.line(self._form.steps))


def _verbs(screen: Screen, store: str) -> list[Claim]:
    """Run `flowstone ls`, `show` and `verify` on act two's store, as a user would do, and return the claims about them.
    """
    verb_claims = []
    for verb in ("ls", "show", "verify"):
        screen.act(f"flowstone {verb} {store}", "")
        done = subprocess.run(
            [sys.executable, "-m", "flowstone", verb, store], capture_output=True, text=True, timeout=VERB_MAX_S,
            env=os.environ | {"COLUMNS": str(screen.width)}, check=False,
        )
        screen.verbatim(done.stdout + done.stderr)
        verb_claims.append(Claim(f"flowstone {verb}", done.returncode == 0, f"exit status {done.returncode}"))
    return verb_claims


def _workplace(directory: Path | None, form: DemoSize) -> Path:
    """Create an empty directory to work in. If the disk has too little space, raises OSError before it creates
    anything.
    """
    target = Path("runs") if directory is None else directory
    existing = next(parent for parent in (target, *target.absolute().parents) if parent.exists())
    if directory is not None and existing == target and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: give an empty or a new directory")
    free = shutil.disk_usage(existing).free
    if free < form.free_bytes:
        raise OSError(f"{existing} has {free / 1e9:.1f} GB free, the demo needs {form.free_bytes / 1e9:.1f}")
    target.mkdir(parents=True, exist_ok=True)
    return target if directory is not None else Path(tempfile.mkdtemp(prefix="demo-", dir=target))


def _clear(work: Path, made: list[Path]) -> None:
    shutil.rmtree(work, ignore_errors=True)
    for parent in made:
        if not any(parent.iterdir()):
            parent.rmdir()
