"""Parity of nodes' data: codes, the places of shards, rebuilding; and a store whose nodes are lost."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from unittest import mock

import msgspec
import numpy as np
import pytest

import flowstone as fs
from flowstone.agent.parities import Parity
from flowstone.config import AGENT_LINGER_S
from flowstone.errors import ArgumentError, BudgetError, FrameworkError, PeerError
from flowstone.format.digest import digest
from flowstone.store.memory.agent_wire import AgentRequest
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.memory.node_memory import AgentTree
from flowstone.store.peers import erasure
from flowstone.store.peers.parity import (
    FileRange,
    ParityContribution,
    RebuildPlan,
    column_of,
    contributions,
    parity_name,
    parts,
    plan_rebuilds,
    rebuild,
    ring,
    shares,
)
from flowstone.store.peers.tree import PeersTree, RebuiltFile
from flowstone.store.peers.view import CompleteStep, FileSource
from flowstone.store.peers.wire import PeerRequest
from memory_agent import own_agent
from peer_nodes import HERE, SECRET, Nodes, at, several_nodes

MISSING = "ISA-L is not installed: pip install 'flowstone[parity]'"
pytestmark = pytest.mark.skipif(not erasure.is_available(), reason=MISSING)


def _times(entry: int, other: int) -> int:
    """In GF(256) with the polynomial of ISA-L, by hand."""
    product = 0
    while other:
        product ^= entry if other & 1 else 0
        entry = (entry << 1) ^ (0x11D if entry & 0x80 else 0)
        other >>= 1
    return product


@pytest.mark.parametrize("length", [1, 7, 31, 32, 64, 1000, 4097])
def test_what_is_accumulated_is_the_product_in_the_field(length: int) -> None:
    source, target = random.Random(length).randbytes(length), bytearray(range(256)) * 17
    for factor in (1, 2, 0x8E, 255):
        expected = bytes(before ^ _times(factor, byte) for before, byte in zip(target, source, strict=False))
        into = (ctypes.c_char * len(target)).from_buffer(target)
        given = ctypes.create_string_buffer(source, length)
        erasure.accumulate(factor, ctypes.addressof(given), ctypes.addressof(into), length)
        del into
        assert target[:length] == expected
        assert target[length : length + 64] == (bytearray(range(256)) * 17)[length : length + 64], "and no byte more"


# Where shards are


@pytest.mark.parametrize("nodes", range(1, 14))
@pytest.mark.parametrize("parity", [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_no_stripe_has_two_shards_on_a_node_and_all_keep_equally_much(nodes: int, parity: tuple[int, int]) -> None:
    actual = {node: shares(node, nodes, *parity) for node in range(nodes)}
    kept = dict.fromkeys(range(nodes), 0)
    stripes: dict[tuple[int, int], list[int]] = {}
    for node, own in actual.items():
        first, length = ring(node, nodes, sum(parity))
        assert first <= node < first + length
        assert length >= min(nodes, sum(parity))
        for share in own:
            assert len(own) == share.columns == length - len(share.keepers)
            assert len(share.keepers) == min(parity[1], length - 1), "as many as may be lost"
            stripes.setdefault((share.group, share.stripe), [*share.keepers]).append(node)
            for holder in share.keepers:
                kept[holder] += 1
    assert all(len(set(on)) == len(on) for on in stripes.values())
    assert nodes == 1 or len({kept[node] for node in range(*_first_group(nodes, parity))}) == 1
    assert not shares(0, 1, *parity), "one node alone keeps no parity"


def _first_group(nodes: int, parity: tuple[int, int]) -> tuple[int, int]:
    first, length = ring(0, nodes, sum(parity))
    return first, first + length


# What can be rebuilt


class Group:
    """Nodes of one group with files, and the parity of these, as dictionaries."""

    def __init__(
        self, nodes: int, parity: tuple[int, int], seed: int, lengths: tuple[int, ...] = (1, 63, 5000, 20_001)
    ) -> None:
        draw = random.Random(seed)
        self.files: dict[str, bytes] = {}
        self.on: list[set[str]] = [set() for _ in range(nodes)]
        self.described: dict[str, ParityContribution] = {}
        for node in range(nodes):
            sizes = [(f"{node}-{index}", draw.choice(lengths)) for index in range(draw.randrange(4))]
            for name, size_bytes in sizes:
                self.files[name] = draw.randbytes(size_bytes)
                self.on[node].add(name)
            self._protect(sizes, shares(node, nodes, *parity))
        self.sizes = {name: len(content) for name, content in self.files.items()}

    def _protect(self, sizes: list[tuple[str, int]], own: tuple[object, ...]) -> None:
        if not own:
            return
        for share, one in zip(own, contributions(sizes, len(own), len(own[0].keepers)), strict=True):  # type: ignore[attr-defined]
            content = b"".join(self.files[part.file][part.offset : part.offset + part.length] for part in parts(one))
            assert len(content) == one.length
            for row, holder in enumerate(share.keepers if content else ()):  # type: ignore[attr-defined]
                name = parity_name(share, "0-0", row)  # type: ignore[arg-type]
                factor = erasure.coefficient(one.columns, one.rows, row, share.column)  # type: ignore[attr-defined]
                before = np.frombuffer(self.files.get(name, b"").ljust(one.length, b"\0"), np.uint8)
                added = np.frombuffer(content, np.uint8)
                table = np.array([_times(factor, byte) for byte in range(256)], np.uint8)
                after = before.copy()
                after[: one.length] ^= table[added]
                self.files[name] = after.tobytes()
                self.on[holder] |= {name, f"{name}.{share.column}"}  # type: ignore[attr-defined]
                self.described[f"{name}.{share.column}"] = one  # type: ignore[attr-defined]

    def without(self, lost: tuple[int, ...]) -> tuple[dict[str, int], dict[str, int]]:
        """Names and sizes of segments that are missing then, and of all files that are available."""
        there = set().union(*(on for node, on in enumerate(self.on) if node not in lost))
        sizes = {name: len(self.files.get(name, b"x")) for name in there}
        segments = {name: size for name, size in self.sizes.items() if not name.startswith(".")}
        return {name: size for name, size in segments.items() if name not in there}, sizes

    def read(self, there: dict[str, int], part: FileRange, target: memoryview) -> None:
        assert part.file in there, "what is lost is not read"
        target[:] = self.files[part.file][part.offset : part.offset + part.length]


@pytest.mark.parametrize("parity", [(1, 1), (3, 1), (2, 2), (4, 2), (3, 3)])
def test_any_nodes_that_may_be_lost_are_rebuilt_bit_for_bit_from_the_others(parity: tuple[int, int]) -> None:
    rebuilt_count = 0
    for seed in range(6):
        nodes = sum(parity) + seed % 3
        group = Group(nodes, parity, seed)
        for lost in combinations(range(nodes), parity[1]):
            missing, there = group.without(lost)
            described = {name: item for name, item in group.described.items() if name in there}
            rebuilds = plan_rebuilds(missing, there, described, lambda name: 7)
            assert set(rebuilds) == set(missing), f"seed {seed}, lost {lost}"
            for name, planned in rebuilds.items():
                _check(group, there, name, planned, random.Random(seed))
                rebuilt_count += 1
    assert rebuilt_count > 20, "most of the nodes that were lost had something"


def _check(group: Group, there: dict[str, int], name: str, entry: RebuildPlan, draw: random.Random) -> None:
    content = group.files[name]
    for _ in range(3):
        begin = draw.randrange(len(content))
        target, space = bytearray(draw.randrange(1, 2 * len(content))), bytearray(draw.randrange(1, 2 * len(content)))

        def read(part: FileRange, into: memoryview, buffer: bytearray = space) -> None:
            assert into.obj is buffer, "no other memory is read into"
            group.read(there, part, into)

        moved = rebuild(entry, begin, memoryview(target), read, memoryview(space))
        assert moved == min(len(target), len(content) - begin)
        assert target[:moved] == content[begin : begin + moved]
        assert not any(target[moved:])


def test_of_a_file_that_is_rebuilt_nothing_can_be_read_as_of_others() -> None:
    group = Group(4, (3, 1), 1, (20_001,))
    node = next(index for index in range(4) if group.on[index] & group.sizes.keys())
    missing, there = group.without((node,))
    rebuilds = plan_rebuilds(
        missing, there, {name: value for name, value in group.described.items() if name in there}, lambda _: 7
    )
    tree, step = mock.Mock(spec=PeersTree), CompleteStep("", {})
    for name, planned in rebuilds.items():
        file = RebuiltFile(tree, step, planned, f"step-00000001/{name}", name)
        assert [file.read(position, position) for position in (0, 1, planned.size_bytes)] == [b"", b"", b""]
        assert file.read(planned.size_bytes, planned.size_bytes + 5) == b""
    assert rebuilds
    tree.read_from.assert_not_called()


def test_one_node_more_is_not_made_up() -> None:
    group = Group(4, (3, 1), 1, (20_001,))
    lost = next(pair for pair in combinations(range(4), 2) if all(group.on[node] & group.sizes.keys() for node in pair))
    missing, there = group.without(lost)
    described = {name: item for name, item in group.described.items() if name in there}
    assert missing
    assert not plan_rebuilds(
        missing, there, described, lambda name: 7
    ), "each has bytes in a stripe that lacks two shards"


def test_parity_that_is_shorter_than_what_it_is_of_is_not_computed_with() -> None:
    group = Group(4, (3, 1), 1, (20_001,))
    node = next(index for index in range(4) if group.on[index] & group.sizes.keys())
    missing, there = group.without((node,))
    described = {name: item for name, item in group.described.items() if name in there}
    left_out = 0
    for name in [name for name in there if name.startswith(".parity-") and column_of(name)[1] is None]:
        rebuilds = plan_rebuilds(missing, there | {name: there[name] - 1}, described, lambda name: 7)
        left_out += rebuilds.keys() < missing.keys()
        for other, planned in rebuilds.items():
            _check(group, there, other, planned, random.Random(1))
    assert left_out, "some parity is needed"
    assert not plan_rebuilds(missing, dict.fromkeys(there, 1) | {
        key: there[key] for key in group.sizes.keys() & there.keys()
                       if not key.startswith(".")}, described, lambda name: 7)


@pytest.mark.parametrize("parity", [(3, 1), (2, 2)])
def test_a_column_of_which_no_description_can_be_read_is_not_taken_for_zeros(parity: tuple[int, int]) -> None:
    group = Group(4, parity, 1, (20_001,))
    node = next(index for index in range(4) if group.on[index] & group.sizes.keys())
    missing, there = group.without((node,))
    described = {name: item for name, item in group.described.items() if name in there}
    left_out = 0
    for stripe, column in sorted({column_of(name) for name in described}, key=str):
        known = {name: item for name, item in described.items() if column_of(name) != (stripe, column)}
        rebuilds = plan_rebuilds(missing, there, known, lambda name: 7)
        left_out += rebuilds.keys() < missing.keys()
        for name, planned in rebuilds.items():
            _check(group, there, name, planned, random.Random(1))
    assert left_out, "some columns are needed"
    for name in described if parity[1] > 1 else ():  # another row's node says the same
        known = {other: item for other, item in described.items() if other != name}
        again = any(column_of(other) == column_of(name) for other in known)
        assert not again or plan_rebuilds(missing, there, known, lambda name: 7).keys() == missing.keys()


@pytest.mark.parametrize("counts", [{"columns": 2}, {"columns": 4}, {"rows": 2}])
def test_a_column_that_says_another_code_than_the_others_is_not_computed_with(counts: dict[str, int]) -> None:
    group = Group(4, (3, 1), 1, (20_001,))
    node = next(index for index in range(4) if group.on[index] & group.sizes.keys())
    missing, there = group.without((node,))
    described = {name: item for name, item in group.described.items() if name in there}
    assert plan_rebuilds(missing, there, described, lambda name: 7).keys() == missing.keys()
    for name in sorted(described):
        forged = described | {name: msgspec.structs.replace(described[name], **counts)}
        rebuilds = plan_rebuilds(missing, there, forged, lambda name: 7)
        for other, planned in rebuilds.items():  # what other stripes have is computed as ever
            _check(group, there, other, planned, random.Random(1))
    all_forged = {name: msgspec.structs.replace(item, **counts) for name, item in list(described.items())[::2]}
    assert plan_rebuilds(missing, there, described | all_forged, lambda name: 7).keys() < missing.keys()


# Options


@pytest.mark.parametrize(("given", "words"), [
    ({"parity": (3, 1), "replicas": 2}, "both given"), ({"parity": (0, 1)}, "out of range"),
    ({"parity": (3, 0)}, "out of range"), ({"parity": (200, 3)}, "out of range"), ({"parity": 3}, "must be"),
])
def test_parity_that_cannot_be_is_refused_when_the_store_is_made(given: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fs.PeerMemory("run", secret=SECRET, interface=HERE, linger_s=AGENT_LINGER_S, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("how", "needed"), [
    ({"replicas": 2}, 2 << 60), ({"replicas": 3}, 3 << 60), ({"parity": (3, 1)}, (1 << 60) + (1 << 60) // 3 + 1),
    ({"parity": (2, 2)}, 2 << 60),
])
def test_a_node_with_less_memory_than_all_it_keeps_is_refused_with_the_numbers(
    how: dict[str, object], needed: int
) -> None:
    with pytest.raises(BudgetError, match="cannot hold 2 generations") as caught:
        fs.PeerMemory("run", secret=SECRET, interface=HERE, state_bytes=1 << 60, **how)  # type: ignore[arg-type]
    assert caught.value.facts["needed"] == f"2 x {needed} bytes"
    assert int(str(caught.value.facts["available"]).split()[0]) > 1 << 20


def test_without_the_library_parity_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "_SYSTEMS", "libnothing.so.0")
    monkeypatch.setattr(erasure, "_WHEELS", "nothing-of-the-kind")
    monkeypatch.setattr(erasure, "library", erasure.library.__wrapped__)
    with pytest.raises(FrameworkError, match=r"parity needs ISA-L") as caught:
        fs.PeerMemory("run", secret=SECRET, interface=HERE, parity=(3, 1))
    assert "flowstone[parity]" in str(caught.value)
    assert not erasure.is_available()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with several_nodes(3) as three:
        yield three


@pytest.fixture
def store(nodes: Nodes) -> Iterator[fs.PeerMemory]:
    (store,) = nodes.stores("strangers", nodes=[0], replicas=None, parity=(2, 1))
    store.make_directory()
    store.lock("the job")
    store.make_directory(".saving-00000001-a")
    yield store
    store.remove(".saving-00000001-a")
    store.close()


PATH = ".saving-00000001-a/.parity-0-0-0-0-0"


def _gather(path: str = PATH, column: int = 0, **how: int) -> PeerRequest:
    record = {"number": 1, "size_bytes": 1000, "payload_bytes": 2} | how
    return PeerRequest("gather", path, target=str(column), **record)  # type: ignore[arg-type]


def test_shares_of_several_lengths_add_up_and_a_column_is_taken_once(store: fs.PeerMemory) -> None:
    first, second = store._peers.link_of(0).link, store._peers.link_of(0).link
    draw = random.Random(5)
    short, long = draw.randbytes(1000), draw.randbytes(5000)
    number = first.request(_gather(), b"{}").number
    first.request(PeerRequest("add", text=digest(short), number=number, payload_bytes=1000), short)
    assert second.request(
        _gather(column=1, number=2, size_bytes=5000), b"{}"
    ).number == number, "one file, which has grown"
    with pytest.raises(OSError, match="do not match their digest"):
        second.request(PeerRequest("add", text=digest(short), number=number, payload_bytes=5000), long)
    second.request(PeerRequest("add", text=digest(long), number=number, payload_bytes=5000), long)
    with pytest.raises(OSError, match="of this name exists"):
        second.request(_gather(column=1), b"{}")
    actual = bytearray(5000)
    assert first.read_into(PeerRequest("read", PATH, number=number, size_bytes=5000), memoryview(actual)) == 5000
    assert actual == bytes(
        _times(2, two) ^ first for first, two in zip(short.ljust(5000, b"\0"), long, strict=True)
    )
    assert store.names(".saving-00000001-a") == (), "parity is in no list"


@pytest.mark.parametrize("asked", [
    _gather("step-00000001/.parity-0-0-0-0-0"), _gather(".saving-00000001-a/rank-00000.safetensors"),
    _gather(number=0), _gather(number=256), _gather(size_bytes=0), _gather(size_bytes=1 << 62),
    PeerRequest("add", number=77, payload_bytes=2), PeerRequest("add", number=77, offset=-1, payload_bytes=2),
], ids=lambda asked: f"{asked.verb}-{asked.path[:8]}-{asked.number}-{asked.size_bytes}-{asked.offset}")
def test_what_adds_to_no_parity_is_refused(store: fs.PeerMemory, asked: PeerRequest) -> None:
    with pytest.raises(OSError, match=r"sends parity for|request to store parity|unknown file|only the holder"):
        store._peers.link_of(0).link.request(asked, b"{}")
    assert store._peers.link_of(0).link.request(
        PeerRequest("names", ".saving-00000001-a")
    ).names == (), "and leaves nothing"


@pytest.mark.parametrize("lacks", ["a part", "its bytes", "the file", "what it is of"])
def test_a_draft_whose_parity_is_not_whole_becomes_no_checkpoint(store: fs.PeerMemory, lacks: str) -> None:
    link, draw = store._peers.link_of(0).link, random.Random(5)
    number = link.request(_gather(), b"{}").number
    for begin in (0, 500) if lacks not in ("a part", "its bytes") else (0,) if lacks == "a part" else ():
        part = draw.randbytes(500)
        link.request(PeerRequest("add", text=digest(part), number=number, offset=begin, payload_bytes=500), part)
    if lacks in ("the file", "what it is of"):
        link.request(PeerRequest("remove", PATH if lacks == "the file" else f"{PATH}.0"))
    with pytest.raises((OSError, fs.FlowstoneError)):
        store.rename(".saving-00000001-a", "step-00000001")
    assert link.request(PeerRequest("exists", ".saving-00000001-a")).yes, "it is a draft still"
    store.rename(".saving-00000001-a", ".deleting-00000001-a")  # which may be removed
    store.rename(".deleting-00000001-a", ".saving-00000001-a")


def test_a_draft_with_all_of_its_parity_becomes_a_checkpoint(store: fs.PeerMemory) -> None:
    link, part = store._peers.link_of(0).link, random.Random(5).randbytes(1000)
    number = link.request(_gather(), b"{}").number
    link.request(PeerRequest("add", text=digest(part), number=number, payload_bytes=1000), part)
    store.rename(".saving-00000001-a", "step-00000001")
    assert not link.request(PeerRequest("exists", ".saving-00000001-a")).yes
    store.rename("step-00000001", ".saving-00000001-a")


def test_parity_is_mapped_once_for_all_that_is_added() -> None:
    with own_agent():
        tree = AgentTree("run", "memory://run")
        tree.keep(AgentRequest("keep", number=2))
        tree.make_directory("")
        tree.make_directory(".saving-00000001-a")
        parity = Parity(tree, PATH)
        mapped = MemoryFile.mapped
        with mock.patch.object(MemoryFile, "mapped", autospec=True, side_effect=mapped) as mapping:
            parity.gather("0", 1 << 20)
            for part in range(64):
                parity.add("0", 1, part << 14, bytearray(1 << 14))
            assert mapping.call_count == 1
            parity.gather("1", 2 << 20)
            parity.add("1", 1, 0, bytearray(1 << 14))
            assert mapping.call_count == 2, "it has grown"
        tree.close()


def test_what_parity_is_of_is_read_from_a_node_that_still_answers() -> None:
    with several_nodes(3) as three:
        stores = three.stores("lost", replicas=None, parity=(1, 2))
        tree, contribution = stores[0]._peers, ParityContribution(1, 2, (("rank-00000.safetensors", 1000),), 0, 1000)
        stores[0].make_directory()
        stores[0].lock("the job")
        stores[0].make_directory(".saving-00000001-a")
        parity = {}
        for row, node in enumerate((1, 2)):
            name = f".parity-0-1-0-0-{row}"
            message = msgspec.msgpack.encode(contribution)
            tree.link_of(node).link.request(_gather(f".saving-00000001-a/{name}", payload_bytes=len(message)), message)
            reported = tree.link_of(node).link.request(PeerRequest("look", f".saving-00000001-a/{name}.0"))
            parity[f"{name}.0"] = (FileSource(node, reported.number, reported.size_bytes),)
        three.lose(2)
        assert tree._described_by(".saving-00000001-a", parity) == {".parity-0-1-0-0-0.0": contribution}
        with pytest.raises(PeerError):  # what is removed next must not follow from a node that is away
            tree._described_by(".saving-00000001-a", parity, of_all=True)
        for store in stores:
            with suppress(fs.FlowstoneError):
                store.close()
        with at(three.directories[2]):
            fs.NodeMemory("run").make_directory()  # the next agent takes over the socket that the killed one has left


def test_ranks_that_differ_in_parity_are_told(nodes: Nodes) -> None:
    (only_entry,) = nodes.stores("differs", nodes=[0])
    (other,) = nodes.stores("differs", nodes=[0], replicas=None, parity=(1, 1))
    own, message = only_entry.introduce(), other.introduce()
    with pytest.raises(ArgumentError, match="another PeerMemory") as caught:
        only_entry.use_addresses([own, message], own)
    assert caught.value.facts["found"] == "differs, parity (1, 1)"
    only_entry.close()
    other.close()

