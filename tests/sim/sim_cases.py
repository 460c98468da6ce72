"""Scenarios, and cases made from them: one crash or one error each, identified by one number."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from sim_dcp import DcpJob, dcp_job
from sim_disk import Change, Disk, Image, PowerLoss, Unsynced, digest_of, make_tree
from sim_group import GroupJob, group
from sim_turns import Freeze
from sim_world import STORE, Job, Oracle, check, engine, job

from flowstone import FlowstoneError, Keep, StepExistsError
from flowstone.commit.entries import DELETING, SAVING, step_directory
from flowstone.delta import compaction
from flowstone.events.phases import RemovalFailed
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.save.pacing import Captures

POWER, KILL, ERROR, FREEZE = 0, 1, 2, 3
MODES = {"power": POWER, "kill": KILL, "error": ERROR, "freeze": FREEZE}
ERRNOS = (errno.EIO, errno.ENOSPC)
ENGINES, ORDERS = 4, 3  # that numbers choose: sim_world.engine, Turns
EACH_WAY = 500  # from this seed on each change at which the power is lost is played in a way of its own
PLAYS_MAX = ENGINES * ORDERS + 1  # each holds several MB
NEAR = {"compress": "max", "kept_bytes": 8 << 20}
DERIVED = {"compress": "derived"}


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the simulation. `at` is the change at which it is stopped or fails."""

    scenario: int
    mode: int
    at: int
    seed: int

    @property
    def number(self) -> int:
        return ((self.scenario * 10 + self.mode) * 10_000 + self.at) * 1_000 + self.seed

    @property
    def order(self) -> int:
        """Decides by which engine bytes move, and the order in which ranks take turns: another for each seed."""
        return self.at + 4 * self.seed

    @property
    def way(self) -> int:
        """As `order`, where the power is lost. A few changes in a row have the same: they leave much that is equal."""
        ways = ENGINES * (ORDERS if SCENARIOS[self.scenario].ranks > 1 else 1)
        return self.at if self.seed >= EACH_WAY else self.at // 3 % ways

    @staticmethod
    def of(number: int) -> Case:
        rest, seed = divmod(number, 1_000)
        rest, position = divmod(rest, 10_000)
        return Case(*divmod(rest, 10), position, seed)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`act` is what a job does while it is watched; `before` what had been done to its store.

    repeat  what the next process does after a kill, if not the same again
    ranks   how many the job has. Of several, one is killed, fails or freezes; the power is lost for all
    modes   in which it is played
    by_dcp  it is saved by dcp.save
    start   the first change at which it is stopped has this in its path
    at_once  a rank does two things at once: what it was told at a change, and what a play that is stopped there
             was told, are not always the same
    coding  how its engine encodes
    """

    name: str
    act: Callable[[Job], None]
    before: Callable[[Path, Oracle], None] = lambda sandbox, oracle: None
    keep: Keep | None = None
    repeat: Callable[[Job], None] | None = None
    ranks: int = 1
    modes: Collection[str] = tuple(MODES)
    start: str = ""
    by_dcp: bool = False
    at_once: bool = False
    coding: Mapping[str, object] | None = None


def _saved(*steps: int) -> Callable[[Path, Oracle], None]:
    def before(sandbox: Path, oracle: Oracle) -> None:
        with job(sandbox, Unsynced(), oracle, attempt="o") as earlier:
            for step in steps:
                earlier.save(step)

    return before


def _saved_near(sandbox: Path, oracle: Oracle) -> None:
    """Two steps, the second of which is encoded with the first one."""
    with job(sandbox, Unsynced(), oracle, attempt="o", coding=NEAR) as earlier:
        _saves(71, 72)(earlier)


def _saved_by_team(*steps: int) -> Callable[[Path, Oracle], None]:
    def before(sandbox: Path, oracle: Oracle) -> None:
        with group(sandbox, Disk(sandbox), oracle, ranks=2, attempt="o") as earlier:
            for step in steps:
                earlier.save(step)

    return before


def _saved_by_dcp(step: int) -> Callable[[Path, Oracle], None]:
    def before(sandbox: Path, oracle: Oracle) -> None:
        with dcp_job(sandbox, Disk(sandbox), oracle, attempt="o") as earlier:
            earlier.save(step)

    return before


def _leftovers(sandbox: Path, oracle: Oracle) -> None:
    """What dead writers may leave: a save all but renamed, an empty one, a deletion half done, files of theirs."""
    _saved(1, 2)(sandbox, oracle)
    store = sandbox / STORE
    shutil.copytree(store / step_directory(2), store / f"{SAVING}00000003-dead")
    (store / f"{SAVING}00000004-dead").mkdir()
    shutil.copytree(store / step_directory(1), store / f"{DELETING}00000000-dead")
    (store / f"{DELETING}00000000-dead" / MANIFEST_NAME).unlink()
    (store / f".{MARKER_NAME}-dead").write_bytes(b"torn")
    (store / ".flowstone-probe-dead").write_bytes(b"")


def _damaged(sandbox: Path, oracle: Oracle) -> None:
    """The newest step has a flipped bit in a tensor."""
    _saved(1, 2)(sandbox, oracle)
    _flip(sandbox / STORE / step_directory(2) / "rank-00000.safetensors")
    oracle.damaged.add("2o")


def _damaged_delta(sandbox: Path, oracle: Oracle) -> None:
    """The newest step refers to the one before, and has a flipped bit in what it has written itself."""
    _saved(51, 52, 53)(sandbox, oracle)
    _flip(sandbox / STORE / step_directory(53) / "rank-00000.safetensors")
    oracle.damaged.add("53o")


def _flip(segment: Path) -> None:
    content = bytearray(segment.read_bytes())
    content[8192] ^= 1
    segment.write_bytes(content)


def _save(step: int) -> Callable[[Job], None]:
    return lambda job: job.save(step)


def _saves(*steps: int) -> Callable[[Job], None]:
    """Of which the third and later ones refer to the one before, if tensors rest."""

    def act(job: Job) -> None:
        for step in steps:
            job.save(step)

    return act


def _resumed(*steps: int) -> Callable[[Job], None]:
    """A process that loads what is there: its first save refers to that."""

    def act(job: Job) -> None:
        job.load()
        _saves(*steps)(job)

    return act


def _compacted(*steps: int) -> Callable[[Job], None]:
    """The third save writes again what rests, as its file has too much else; later ones refer to what that wrote."""

    def act(job: Job) -> None:
        with mock.patch.object(compaction, "COMPACT_BELOW", 0.95):
            _saves(*steps)(job)

    return act


def _overwrite(job: Job) -> None:
    before = sorted(job.store.root.rglob("*"))
    job.refused(2)
    job.refused(1)
    lock = {job.store.root / "flowstone.lock"}
    assert set(job.store.root.rglob("*")) - lock == set(before) - lock, "a refused save changed something"


def _rewind(job: Job) -> None:
    job.rewind(1)
    job.save(2)


def _rewind_deltas(job: Job) -> None:
    job.rewind(52)
    job.save(53)


def _fall_back_to_delta(job: Job) -> None:
    job.fall_back()
    job.save(53)


def _only_rewind(job: Job) -> None:
    job.rewind(1)


def _fall_back(job: Job) -> None:
    job.fall_back()
    job.save(2)


def _life(job: Job) -> None:
    """One process, all of it: what each part has not yet synced is carried into the next."""
    for step in (1, 2, 3):
        job.save(step)
    job.refused(3)
    job.rewind(2)
    for step in (3, 4):
        job.save(step)


def _two_saves(job: Job) -> None:
    """The first waits for a plan, the second goes by it; what is old goes."""
    job.save(3)
    job.save(4)


def _beside_training(*steps: int) -> Callable[[Job], None]:
    """Captured late: the segments of all but the first are reserved by another thread."""

    def act(job: Job) -> None:
        job.fence = "manual"
        for step in steps:
            job.save(step)

    return act


def _two_tries(job: GroupJob) -> None:
    """A rank that was given up in the first may go on in the middle of the second."""
    with suppress(StepExistsError):
        job.save_twice(2)


def _overlapping(job: GroupJob) -> None:
    """Once there is a plan, the second begins before the first is committed."""
    job.save(2)
    job.save_both(3, 4)


def _held(act: Callable[[GroupJob], None]) -> Callable[[GroupJob], None]:
    """No copy fits the budget: where there is no plan yet, `save` itself waits for the other rank and its capture."""

    def held(job: GroupJob) -> None:
        with mock.patch.object(Captures, "room_for_copies", 0):
            act(job)

    return held


def _overlapping_layouts(job: GroupJob) -> None:
    """The second begins before the first is committed, and has no plan yet."""
    job.save(1)
    job.save_both(2, 51)


def _by_dcp(name: str, *steps: int, **options: object) -> Scenario:
    """Of dcp.save. Its ranks meet by collectives: one that freezes holds up all, until they are dead or go on."""

    def act(job: DcpJob) -> None:
        for step in steps:
            job.save(step)

    return Scenario(name, act, modes=("power", "kill", "error"), by_dcp=True, **options)  # type: ignore[arg-type]


SCENARIOS: Sequence[Scenario] = (
    Scenario("first_save", _save(1)),
    Scenario("second_save", _save(2), _saved(1)),
    Scenario("overwrite", _overwrite, _saved(1, 2)),
    Scenario("retention", _save(3), _saved(1, 2), Keep(last=1)),
    Scenario("sweep", _save(3), _leftovers),
    Scenario("rewind", _rewind, _saved(1, 2, 3)),
    Scenario("fallback", _fall_back, _damaged),
    Scenario("rewind_alone", _only_rewind, _saved(1, 2, 3)),
    Scenario("life", _life, keep=Keep(last=2), repeat=_save(9)),
    Scenario("team_first_save", _save(1), ranks=2),
    Scenario("team_second_save", _save(2), _saved(1), ranks=2),
    Scenario("team_two_tries", _two_tries, _saved(1), ranks=2, modes=("freeze",)),
    Scenario(
        "team_overlapping", _overlapping, _saved(1), Keep(last=2), repeat=_save(9), ranks=2, start=".saving-00000003",
        at_once=True,
    ),
    Scenario("team_life", _two_saves, _saved(1, 2), Keep(last=2), ranks=3),
    Scenario(
        "saves_beside_training", _beside_training(1, 2, 3), keep=Keep(last=1), repeat=_beside_training(8, 9),
        start=".saving-00000002",
    ),
    Scenario("deltas", _saves(51, 52, 53, 54), keep=Keep(last=1), repeat=_saves(58, 59), start=".saving-00000053"),
    Scenario(
        "team_deltas", _saves(51, 52, 53), keep=Keep(last=1), repeat=_saves(58, 59), ranks=2, start=".saving-00000053"
    ),
    Scenario("deltas_resumed", _resumed(54, 55), _saved(51, 52, 53), Keep(last=1), _resumed(58)),
    Scenario(
        "team_deltas_resumed", _resumed(54), _saved_by_team(51, 52, 53), Keep(last=1), _resumed(58), ranks=2,
    ),
    Scenario(
        "deltas_compacted", _compacted(51, 52, 53, 54, 55), keep=Keep(last=1), repeat=_compacted(58, 59),
        start=".saving-00000053",
    ),
    _by_dcp("dcp_first_save", 1),
    _by_dcp("dcp_second_save", 2, before=_saved(1)),
    _by_dcp("dcp_overwrite", 2, before=_saved_by_dcp(2)),
    _by_dcp("dcp_two_saves", 1, 2),
    _by_dcp("dcp_team_first_save", 1, ranks=2),
    _by_dcp("dcp_team_second_save", 2, before=_saved(1), ranks=2),
    _by_dcp("dcp_team_overwrite", 2, before=_saved_by_dcp(2), ranks=2),
    Scenario(
        "near", _saves(71, 72, 73), keep=Keep(last=1), repeat=_saves(78, 79), start=".saving-00000072", coding=NEAR
    ),
    Scenario("near_resumed", _resumed(73, 74), _saved_near, Keep(last=1), _resumed(78), coding=NEAR),
    Scenario(
        "derived", _saves(71, 72), keep=Keep(last=1), repeat=_saves(78, 79), start=".saving-00000071", coding=DERIVED
    ),
    Scenario(
        "derived_compacted", _compacted(71, 72, 73, 74, 75), keep=Keep(last=1), repeat=_compacted(78, 79),
        start=".saving-00000073", coding=DERIVED,
    ),
    Scenario(
        "team_derived", _saves(71, 72), keep=Keep(last=1), repeat=_saves(78, 79), ranks=2, start=".saving-00000072",
        coding=DERIVED,
    ),
    Scenario(
        "team_near", _saves(71, 72, 73), keep=Keep(last=1), repeat=_saves(78, 79), ranks=2, start=".saving-00000073",
        coding=NEAR,
    ),
    Scenario("deltas_rewound", _rewind_deltas, _saved(51, 52, 53, 54)),
    Scenario("deltas_fallback", _fall_back_to_delta, _damaged_delta),
    Scenario(
        "team_deltas_compacted", _compacted(51, 52, 53, 54), keep=Keep(last=1), repeat=_compacted(58, 59), ranks=2,
        start=".saving-00000053",
    ),
    Scenario("team_held", _held(_save(2)), _saved(1), ranks=2),
    Scenario("team_held_two_tries", _held(_two_tries), _saved(1), ranks=2, modes=("freeze",)),
    Scenario(
        "team_held_overlapping", _held(_overlapping_layouts), keep=Keep(last=2), repeat=_held(_save(59)), ranks=2,
        start=".saving-00000002", at_once=True,
    ),
)


class Violation(AssertionError):
    """A promise that did not hold. The number repeats the case."""

    def __init__(self, case: Case, error: Exception, changes: Sequence[Change]) -> None:
        trace = "\n".join(map(str, changes))
        self.case = case
        self.what = f"{SCENARIOS[case.scenario].name}: {type(error).__name__}: {error}"
        super().__init__(f"{self.what}\nchanges up to there:\n{trace}\n{case}\nrepeat with SIM={case.number}")


@dataclass(frozen=True, slots=True)
class Moment:
    """Before a change, or after the last: what a power loss may leave then, and what the user may rely on."""

    image: Image
    oracle: Oracle


@dataclass(frozen=True, slots=True)
class Play:
    """One run of the scenario to its end. `moments` has one for each change, and one more."""

    moments: Sequence[Moment]
    changes: Sequence[Change]


class Simulation:
    """Plays the cases of one scenario in directories under `scratch`, which it empties again.

    For losses of power it plays the scenario to the end, once in each of the ways of `Case.way`, and takes the moments
    of all changes as it goes: up to there a play that is to be stopped does the same. What has been found to keep all
    promises is not checked again where bytes and promises are the same.
    """

    def __init__(self, scenario: int, scratch: Path) -> None:
        self._number, self._scenario, self._scratch = scenario, SCENARIOS[scenario], scratch
        self._plays: dict[int, Play] = {}
        self._stopped: dict[int, tuple[Moment, Sequence[Change]]] = {}  # the last one
        self._sound: set[object] = set()
        self._base, self._oracle = scratch / "base", Oracle()
        self._base.mkdir()
        self._scenario.before(self._base, self._oracle)

    def cases(self, mode: int, seeds: Callable[[int], Sequence[int]], start: str = "") -> Iterator[list[Case]]:
        """Every change of the scenario that has seeds; and for a crash also the moment after the last.

        start  begin at the first change whose path has this in it; else where the scenario says
        """
        changes = self._play(self._disk()).changes
        start = start or self._scenario.start
        first = next(change.number for change in changes if start in change.path)
        for index in range(first, len(changes) + (mode in (POWER, KILL))):
            if cases := [Case(self._number, mode, index, seed) for seed in seeds(index)]:
                yield cases

    def play_through(self) -> Path:
        """To the end. Where the store is then."""
        disk = self._disk()
        self._play(disk)
        return disk.sandbox

    def run(self, cases: Sequence[Case]) -> list[Violation]:
        """Play cases of one mode and change; what they violate."""
        runs = {POWER: self._power, KILL: self._kill, ERROR: self._error, FREEZE: self._freeze}
        return runs[cases[0].mode](cases)

    def _power(self, cases: Sequence[Case]) -> list[Violation]:
        collected = []
        for case in cases:
            moment, changes = self._at_power_loss(case)
            checked = lambda: self._check(moment.image, moment.oracle, case.seed)  # noqa: B023, E731
            collected += self._judged(case, changes, checked)
        return collected

    def _at_power_loss(self, case: Case) -> tuple[Moment, Sequence[Change]]:
        if not self._scenario.at_once:
            play = self._played(case.way)
            return play.moments[min(case.at, len(play.changes))], play.changes
        if case.at not in self._stopped:
            disk, oracle = self._disk(stop_at=case.at), self._oracle.copy()
            self._play(disk, oracle, number=case.at)
            self._stopped = {case.at: (Moment(disk.image(), oracle), disk.changes)}
        return self._stopped[case.at]

    def seen_and_left(self, position: int) -> tuple[Moment, Moment]:
        """What is seen at a change, and what there is when a play that is stopped there has ended."""
        disk, oracle, seen = self._disk(stop_at=position), self._oracle.copy(), []
        disk.watch = lambda: seen.append(Moment(disk.image(), oracle.copy()))
        self._play(disk, oracle, number=position)
        return seen[-1], Moment(disk.image(), oracle)

    def _played(self, way: int) -> Play:
        """To the end, by that number; each once."""
        if way not in self._plays:
            if len(self._plays) == PLAYS_MAX:
                del self._plays[next(iter(self._plays))]
            disk, oracle, moments = self._disk(), self._oracle.copy(), []
            disk.watch = lambda: moments.append(Moment(disk.image(), oracle.copy()))
            self._play(disk, oracle, number=way)
            disk.watch()
            self._plays[way] = Play(moments, tuple(disk.changes))
        return self._plays[way]

    def _kill(self, cases: Sequence[Case]) -> list[Violation]:
        wrong = []
        for case in cases:
            disk, oracle = self._disk(stop_at=case.at, spares_others=self._scenario.ranks > 1), self._oracle.copy()
            wrong += self._judged(case, disk.changes, lambda: self._play(disk, oracle, number=case.order))  # noqa: B023
            wrong += self._judged(case, disk.changes, lambda: self._proceed(case, disk, oracle))  # noqa: B023
        return wrong

    def _proceed(self, case: Case, disk: Disk, oracle: Oracle) -> None:
        """The kernel has all that was written. Check that; then the next job repeats, and then the power fails."""
        disk.restart(case.seed)
        self._check(disk.image(), oracle, 2)
        repeat = self._scenario.repeat or self._scenario.act
        with self._job(disk, oracle, number=case.order, attempt="b", again=True) as later:
            repeat(later)
        self._check_after(disk, oracle, case)

    def _error(self, cases: Sequence[Case]) -> list[Violation]:
        collected = []
        for case in cases:
            disk, oracle = self._disk(fail_at=case.at), self._oracle.copy()
            disk.errno = ERRNOS[case.seed % 2]
            collected += self._judged(case, disk.changes, lambda: self._survive(case, disk, oracle))  # noqa: B023
        return collected

    def _survive(self, case: Case, disk: Disk, oracle: Oracle) -> None:
        """One error: told once, nothing lost, and the same Checkpointer goes on."""
        with self._job(disk, oracle, number=case.order, by_wait=case.seed % 4 >= 2) as hurt:
            reported = None
            try:
                self._scenario.act(hurt)
            except FlowstoneError as error:
                reported = error
            hurt.settle()
            assert disk.failed is not None, "the change was not reached"
            _check_told(reported, hurt, disk)
            hurt.wait()  # which must not tell it again
            self._check(disk.image(), oracle, 2, proceed=False)
            hurt.try_again("b")
            (self._scenario.repeat or self._scenario.act)(hurt)
        self._check_after(disk, oracle, case)

    def _freeze(self, cases: Sequence[Case]) -> list[Violation]:
        """One rank stops for so long that the others give it up, and then goes on."""
        collected = []
        for case in cases:
            disk, oracle = self._disk(), self._oracle.copy()
            if case.seed:
                collected += self._judged(case, disk.changes, lambda: self._thaw(case, disk, oracle))  # noqa: B023
                continue
            played = lambda: self._play(disk, oracle, number=case.order, freeze=Freeze(case.at))  # noqa: B023, E731
            collected += self._judged(case, disk.changes, played)
            collected += self._judged(case, disk.changes, lambda: self._proceed(case, disk, oracle))  # noqa: B023
        return collected

    def _thaw(self, case: Case, disk: Disk, oracle: Oracle) -> None:
        """Once all are there again, the same ranks do the same once more, and it succeeds."""
        after, spoilt = divmod(case.seed - 1, 2)
        freeze = Freeze(case.at, after or None, spoilt=spoilt == 1)
        with self._job(disk, oracle, number=case.order, freeze=freeze) as acting:
            with suppress(FlowstoneError):
                self._scenario.act(acting)
            acting.settle()
            acting.try_again("b")
            (self._scenario.repeat or self._scenario.act)(acting)
        self._check_after(disk, oracle, case)

    def _check_after(self, disk: Disk, oracle: Oracle, case: Case) -> None:
        """The power fails at the end: once everything that is not synced is lost, once a part of it."""
        self._check(disk.image(), oracle, 0, proceed=False)
        self._check(disk.image(), oracle, 3 + case.at + case.seed)

    def _check(self, image: Image, oracle: Oracle, seed: int, *, proceed: bool = True) -> None:
        """Of equal bytes, promises and engines one check tells all."""
        tree, target = image.after_power_loss(seed), self._scratch / "after"
        asked = (digest_of(tree), oracle.frozen(), engine(seed), proceed)
        if asked in self._sound:
            return
        try:
            make_tree(target, tree)
            check(target, oracle, number=seed, proceed=proceed)
        finally:
            shutil.rmtree(target)
        self._sound.add(asked)

    def _disk(self, **options: object) -> Disk:
        sandbox = self._scratch / "disk"
        shutil.rmtree(sandbox, ignore_errors=True)
        shutil.copytree(self._base, sandbox)
        return Disk(sandbox, **options)  # type: ignore[arg-type]

    def _job(self, disk: Disk, oracle: Oracle, **options: object):
        if self._scenario.ranks > 1:
            options["ranks"] = self._scenario.ranks
        if self._scenario.coding is not None:
            options["coding"] = self._scenario.coding
        make = dcp_job if self._scenario.by_dcp else group if self._scenario.ranks > 1 else job
        return make(disk.sandbox, disk, oracle, keep=self._scenario.keep, **options)

    def _play(self, disk: Disk, oracle: Oracle | None = None, number: int = 0, **options: object) -> Disk:
        """Up to the end of it, or of the process or rank that is stopped; those that live on may be told so."""
        spared = self._scenario.ranks > 1 and (disk.stop_at is not None or bool(options))
        reported = (PowerLoss, FlowstoneError) if spared else PowerLoss
        with self._job(disk, oracle or self._oracle.copy(), number=number, **options) as acting, suppress(reported):
            self._scenario.act(acting)
        return disk

    def _judged(self, case: Case, changes: Sequence[Change], promise: Callable[[], None]) -> list[Violation]:
        try:
            promise()
        except Exception as error:  # whatever ends a check is a promise broken
            return [Violation(case, error, changes[: case.at + 1])]
        return []


def _check_told(error: FlowstoneError | None, hurt: Job, disk: Disk) -> None:
    """The error reached the caller, with its reason; or an event, if it was only a removal's."""
    if error is None:
        is_told = hurt.heard(disk.failed.path) if isinstance(hurt, DcpJob) else any(
            isinstance(event, RemovalFailed) for event in hurt.events
        )
        assert is_told, f"no event reported {disk.failed}"
        return
    cause: BaseException | None = error
    while cause is not None and not getattr(cause, "errno", 0):
        cause = cause.__cause__
    expected = errno.ENOSPC if disk.failed is not None and disk.failed.kind == "fill" else disk.errno
    assert cause is not None, f"no errno in {error}"
    assert cause.errno == expected, f"{os.strerror(cause.errno)} was told, not {os.strerror(expected)}"  # type: ignore[attr-defined]
