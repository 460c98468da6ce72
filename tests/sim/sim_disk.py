"""A disk that numbers every change, stops or fails at one of them, and knows which states a power loss may leave.

`Disk` replaces LocalStore's interface to the operating system (store/system.py). Every change is made for real in a
sandbox, except syncs, which only change the model: under which names each file and directory may be found after a power
loss, and which contents a file may have. An `Image` is the model at one moment, and selects one such state by a seed. A
disk returns its image when it is stopped. A watched disk also returns one at each change, so that one run shows the
possible effects of a power loss at any change.

The model is as adverse as docs/ORDERING.md allows. Each entry that is not synced exists or not, independently of all
others; a renamed one has either name. A file that is not synced has any mixture of 4 KiB blocks, and any length between
the synced one and its own. A promise that holds here also holds on a journalling file system, which has fewer states.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowstone.config import BLOCK_BYTES
from flowstone.store.system import System

SANDBOX = 0  # the number of the directory that all others lie in; it is durable
Tree = Mapping[str, bytes | None]  # by path, parents first: a file's content; None for a directory
_FULL = "/dev/full"


class PowerLoss(BaseException):
    """Everything ends here. No Exception, so that no code of ours lives on by catching it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One numbered operation.

    kind  mkdir create reserve fill resize extend append write sync sync_directory rename exchange link unlink rmdir
    """

    number: int
    kind: str
    path: str

    def __str__(self) -> str:
        return f"{self.number:4d}  {self.kind:14} {self.path}"


@dataclass(slots=True)
class Node:
    """A file or a directory.

    places   (directory, name) or None where it is not: first the durable one, then one for
             each change since its directory was synced, the last as it is now
    durable  a file's content at its last sync
    left     a file's content at its removal, which a power loss may undo
    clean    the content is durable
    bulk     a segment: written by the engine, in any order, until it is synced
    """

    directory: bool
    places: list[tuple[int, str] | None]
    durable: bytes = b""
    left: bytes = b""
    clean: bool = False
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class Image:
    """What the model says at one moment.

    now      what files that are not clean hold, by their numbers
    changes  how many had been begun
    """

    nodes: Mapping[int, Node]
    now: Mapping[int, bytes]
    changes: int

    def after_power_loss(self, seed: int) -> Tree:
        """A state that a power loss may leave.

        seed  0: of what is not synced, nothing; 1: every entry, no content; 2: everything; else a mixture
        """
        chance = random.Random(f"{seed} after {self.changes}")
        places = self._surviving_places(seed, chance)
        paths, tree = {SANDBOX: ""}, {}
        waiting = [number for number in places if number != SANDBOX]
        while waiting:  # parents first; what lies in a directory that is gone is gone with it
            ready = [n for n in waiting if places[n][0] in paths]
            for number in ready:
                parent, name = places[number]
                paths[number] = os.path.join(paths[parent], name)
                is_directory = self.nodes[number].directory
                tree[paths[number]] = None if is_directory else self._surviving_content(number, seed, chance)
            waiting = [n for n in waiting if n not in paths] if ready else []
        return tree

    def _surviving_places(self, seed: int, chance: random.Random) -> dict[int, tuple[int, str]]:
        parent = {}
        for number, node in self.nodes.items():
            last = len(node.places) - 1
            parent[number] = {0: 0, 1: last, 2: last}.get(seed, chance.randint(0, last))
        while True:  # a name leads to one node: the one that had it first has moved on by then
            holders: dict[tuple[int, str], int] = {}
            clash = None
            for number, node in self.nodes.items():
                place = node.places[parent[number]]
                if place is not None and holders.setdefault(place, number) != number:
                    clash = [n for n in (holders[place], number) if parent[n] < len(self.nodes[n].places) - 1]
            if clash is None:
                return {place_of: place for place, place_of in holders.items()}
            parent[clash[0]] += 1

    def _surviving_content(self, number: int, seed: int, chance: random.Random) -> bytes:
        node = self.nodes[number]
        if node.clean or seed in (0, 1):
            return node.durable
        now = self.now[number]
        if seed == 2:
            return now
        least = min(len(node.durable), len(now))  # what was synced does not go with what follows it
        lengths = [len(node.durable), len(now), len(now), chance.randrange(least, len(now) + 1)]
        return _torn(node.durable, now, chance.choice(lengths), chance)


def make_tree(target: Path, tree: Tree) -> None:
    """`target` must not be there."""
    target.mkdir()
    for path, content in tree.items():
        if content is None:
            (target / path).mkdir()
        else:
            (target / path).write_bytes(content)


def digest_of(tree: Tree) -> bytes:
    """Two trees have the same if they are the same."""
    digest = hashlib.blake2b()
    for path, content in sorted(tree.items()):
        digest.update(repr((path, None if content is None else len(content))).encode())
        digest.update(content or b"")
    return digest.digest()


@dataclass
class Disk(System):
    """See above. Safe from any thread; numbers repeat from run to run if the threads' order does.

    stop_at        the number of the change at which the power is lost; a write is half done by then
    spares_others  only the rank that makes that change ends there, killed
    fail_at        the number of the change that fails, once, with `errno`
    watch          is called at each change, where the power would be lost
    """

    sandbox: Path
    stop_at: int | None = None
    fail_at: int | None = None
    errno: int = errno.EIO
    spares_others: bool = False
    changes: list[Change] = field(default_factory=list)
    lost: bool = False
    failed: Change | None = None
    watch: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._guard = threading.RLock()
        self._nodes: dict[int, Node] = {SANDBOX: Node(True, [None])}
        self._open: dict[int, int] = {}
        self._seen: dict[int, bytes] = {}
        self._adopt(self.sandbox, SANDBOX)

    # What LocalStore calls

    def make_directory(self, path: Path, parent: int | None = None) -> None:
        with self._guard:
            self._begin("mkdir", path)
            super().make_directory(path, parent)
            self._add(Node(True, [None, self._place(path)]))

    def create(self, path: Path, flags: int, parent: int | None = None) -> int:
        with self._guard:
            self._begin("create", path)
            known = path.exists()
            fd = super().create(path, flags, parent)
            self._open[fd] = self._find(path) if known else self._add(Node(False, [None, self._place(path)]))
            return fd

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Two changes: the reservation, and the bytes that the engine begins to write after it."""
        with self._guard:
            number = self._open[fd]
            self._begin("reserve", self._path(number))
            super().reserve(fd, size_bytes)
            self._nodes[number].bulk = True
            try:
                self._begin("fill", self._path(number))
            except OSError:
                full = os.open(_FULL, os.O_RDWR | os.O_CLOEXEC)  # the engine itself meets the error
                os.dup2(full, fd, inheritable=False)
                os.close(full)

    def resize(self, fd: int, size_bytes: int) -> None:
        with self._guard:
            node = self._nodes[self._open[fd]]
            node.clean, node.bulk = False, True
            self._begin("resize", self._path(self._open[fd]))
            super().resize(fd, size_bytes)

    def write(self, fd: int, content: bytes | memoryview) -> None:
        with self._guard:
            node = self._nodes[self._open[fd]]
            node.clean = False
            half = len(content) // 2
            self._begin("write", self._path(self._open[fd]), lambda: System.write(self, fd, content[:half]))
            super().write(fd, content[half:])

    def extend(self, fd: int, size_bytes: int) -> None:
        with self._guard:
            node = self._nodes[self._open[fd]]
            node.clean = False
            self._begin("extend", self._path(self._open[fd]))
            super().extend(fd, size_bytes)

    def write_at(self, fd: int, parts: Sequence[memoryview], offset_bytes: int) -> None:
        with self._guard:
            node = self._nodes[self._open[fd]]
            node.clean = False
            half = len(parts) // 2
            make_half = lambda: System.write_at(self, fd, parts[:half], offset_bytes)  # noqa: E731
            self._begin("append", self._path(self._open[fd]), make_half)
            super().write_at(fd, parts[half:], offset_bytes + sum(map(len, parts[:half])))

    def sync_bytes(self, fd: int) -> None:
        self.sync(fd)

    def sync(self, fd: int) -> None:
        with self._guard:
            path = self._path(self._open[fd])
            self._begin("sync", path)
            node = self._nodes[self._open[fd]]
            node.durable, node.clean = path.read_bytes(), True

    def sync_directory(self, path: Path, fd: int | None = None) -> None:
        if not path.is_relative_to(self.sandbox):
            return  # durable before the world began
        with self._guard:
            self._begin("sync_directory", path)
            here = self._find(path)
            for number, node in list(self._nodes.items()):
                if any(place is not None and place[0] == here for place in node.places):
                    node.places = node.places[-1:]
                    if node.places == [None]:
                        del self._nodes[number]

    def rename(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        with self._guard:
            self._begin("rename", target)
            assert source.parent == target.parent, "the model knows renames within one directory"
            number = self._find(source)
            super().rename(source, target, source_at, target_at)
            self._nodes[number].places.append(self._place(target))

    def link(self, source: Path, target: Path, source_at: int | None = None, target_at: int | None = None) -> None:
        """A file of its own in the model, since a durable file does not change any more."""
        with self._guard:
            self._begin("link", target)
            node = self._nodes[self._find(source)]
            assert node.clean, "only what is durable is linked"
            super().link(source, target, source_at, target_at)
            self._add(Node(False, [None, self._place(target)], durable=node.durable, clean=True, bulk=node.bulk))

    def exchange(self, path: Path, other: Path, parent: int) -> None:
        with self._guard:
            self._begin("exchange", other)
            numbers = self._find(path), self._find(other)
            places = self._place(path), self._place(other)
            super().exchange(path, other, parent)
            for number, place in zip(numbers, reversed(places), strict=True):
                self._nodes[number].places.append(place)

    def unlink(self, path: Path, parent: int | None = None) -> None:
        with self._guard:
            self._begin("unlink", path)
            node = self._nodes[self._find(path)]
            node.left = path.read_bytes()
            super().unlink(path, parent)
            node.places.append(None)

    def remove_directory(self, path: Path, parent: int | None = None) -> None:
        with self._guard:
            self._begin("rmdir", path)
            node = self._nodes[self._find(path)]
            super().remove_directory(path, parent)
            node.places.append(None)

    # What a test asks

    def check_power(self) -> None:
        """Raise where a caller would otherwise live on after its machine is gone."""
        if self.lost:
            raise PowerLoss

    def restart(self, seed: int) -> None:
        """The process died, not the machine: all written so far is there, a segment in flight by halves."""
        chance = random.Random(seed)
        for number, node in self._nodes.items():
            if node.bulk and not node.clean and node.places[-1] is not None:
                path = self._path(number)
                now = path.read_bytes()
                path.write_bytes(_torn(b"", now, len(now), chance) if chance.random() < 0.8 else now)
        self.stop_at = self.fail_at = None
        self.lost, self.changes = False, []

    def image(self) -> Image:
        """What a power loss may leave now."""
        with self._guard:
            unclean = [number for number, node in self._nodes.items() if not (node.directory or node.clean)]
            nodes = {number: replace(node, places=list(node.places)) for number, node in self._nodes.items()}
            return Image(nodes, {number: self._now(number) for number in unclean}, len(self.changes))

    def after_power_loss(self, target: Path, seed: int) -> None:
        """Make a state that a power loss now may leave, in `target`. See Image."""
        make_tree(target, self.image().after_power_loss(seed))

    # The model

    def _begin(self, kind: str, path: Path, make_half: Callable[[], None] = lambda: None) -> None:
        """Number a change that is about to be made; stop or fail here, half-way in it, if it is the one to."""
        self.check_power()
        change = Change(len(self.changes), kind, str(path.relative_to(self.sandbox)))
        self.changes.append(change)
        make_half()
        if self.watch is not None:
            self.watch()
        if change.number == self.stop_at:
            self.lost = not self.spares_others
            raise PowerLoss(str(change))
        if change.number == self.fail_at:
            self.failed = change
            raise OSError(self.errno, os.strerror(self.errno), str(path))

    def _adopt(self, directory: Path, number: int) -> None:
        """What is in the sandbox from the start is durable."""
        for path in sorted(directory.iterdir()):
            if path.is_dir():
                self._adopt(path, self._add(Node(True, [(number, path.name)])))
            else:
                self._add(Node(False, [(number, path.name)], durable=path.read_bytes(), clean=True))

    def _add(self, node: Node) -> int:
        number = max(self._nodes) + 1
        self._nodes[number] = node
        return number

    def _find(self, path: Path) -> int:
        if path == self.sandbox:
            return SANDBOX
        place = self._place(path)
        for number, node in self._nodes.items():
            if node.places[-1] == place:
                return number
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _place(self, path: Path) -> tuple[int, str]:
        return self._find(path.parent), path.name

    def _now(self, number: int) -> bytes:
        """What a file that is not clean holds. Images in a row share it where it is the same."""
        node = self._nodes[number]
        now = node.left if node.places[-1] is None else self._path(number).read_bytes()
        if self._seen.get(number) != now:
            self._seen[number] = now
        return self._seen[number]

    def _path(self, number: int) -> Path:
        if number == SANDBOX:
            return self.sandbox
        place = self._nodes[number].places[-1]
        assert place is not None, "a removed file has no path"
        return self._path(place[0]) / place[1]


def _torn(old: bytes, new: bytes, length: int, chance: random.Random) -> bytes:
    """`length` bytes of which each block is of `new` or of `old`, or zero where that has none."""
    blocks = []
    for start in range(0, length, BLOCK_BYTES):
        block = chance.choice((old, new))[start : start + BLOCK_BYTES]
        blocks.append(block.ljust(BLOCK_BYTES, b"\0"))
    return b"".join(blocks)[:length]


class Unsynced(System):
    """The operating system without its waits for the device: for what is checked, not crashed."""

    def sync_bytes(self, fd: int) -> None:
        pass

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path, fd: int | None = None) -> None:
        pass
