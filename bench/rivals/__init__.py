"""The rivals. Each has a module, which is loaded only in the process that measures it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.rivals.base import Rival

OURS = "flowstone"
PHASE = 64  # where large tensors usually start in their page with torch's own allocator
OTHER_PHASE = PHASE + 2048
REPLICAS = "flowstone-replicas"
CACHED, BUFFERED = "cached", "through the page cache"
CONDITIONS = ("cold", f"cold, {BUFFERED}", f"{CACHED}, {BUFFERED}")  # the conditions under which replicas are loaded
SHARED, ALONE = "reads shared", "each rank for itself"


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the programme: a rival, or Flowstone in one setting.

    module       in this package; its `open_rival(name, directory)` returns the Rival
    saves        in one process: the first is cold, later ones find what it left (memory, plans, caches)
    loads        the ways to load its checkpoints; ratios use the first
    times_loaded in one process, for each way
    environment  of bench/pins in which its process runs; None: the benchmark's own
    rounds       the most rounds, for slow rivals without a goal; None: all
    note         for readers of its row
    shape        of the state, see bench/state.py
    phases       where tensors start in their page at save and at load; None: chosen by the allocator
    ranks        of one job, each with its part of every tensor, that saves one checkpoint into one store
    replicas     each rank has the full state instead; it has fewer bytes, so that all together hold as much as others
    io_uring     False: the kernel refuses it
    """

    name: str
    title: str
    module: str
    saves: int = 2
    loads: tuple[str, ...] = ()
    times_loaded: int = 1
    environment: str | None = None
    rounds: int | None = None
    note: str = ""
    shape: str = "llama"
    phases: tuple[int | None, int | None] = (None, None)
    ranks: int = 1
    replicas: bool = False
    io_uring: bool = True

    @property
    def is_ours(self) -> bool:
        return self.module == "ours"


def replica_load(condition: str, how: str) -> str:
    """The way to load replicas under one of CONDITIONS, with reads SHARED or ALONE."""
    return f"{condition}, {how}"


_OURS = ("Checkpointer.load",)
_FEWER = 3
_BCP_NOTE = (
    "framework ddp, one rank. It runs on the torch of the other rows, because torch 2.5.0, which it requires, has only "
    "builds with CUDA for this platform. Its RPC server is started before the timer"
)
_TC_NOTE = (
    "with its defaults, saves fail on ext4 (EINVAL, since it uses O_DIRECT from unaligned buffers), so "
    "use_direct_io=False. Its process and staging memory are created before the timer (prewarm_staging)"
)
_ORBAX_NOTE = "tensors are passed as numpy views, and copied back after a restore"
_DATASTATES_NOTE = (
    "an EMULATION of DataStates-LLM's file layout, because its own engine needs CUDA. Tensors are copied into host "
    "memory that was touched before the timer. One thread writes them through the page cache (open, seek, write, close "
    "for each). fsync, which the engine omits, is added"
)
_EACH_NOTE = "as Gossman et al. (arXiv 2512.24511) ran it, with one take for each tensor, and batching off"
_ASYNC_NOTE = (
    "async_take of version 0.1.0 does not copy CPU tensors that are too large for its slabs, so it writes values that "
    "these tensors get after the call"
)
_THROUGH_NOTE = "flowstone.adapters.dcp.FlowstoneWriter and FlowstoneReader, with one writer for all saves"

FLOWSTONE = (
    Entry(OURS, "Flowstone", "ours", 3, _OURS),
    Entry(
        "flowstone-in-place", "Flowstone, loads in phase", "ours", 3, _OURS, phases=(PHASE, PHASE),
        note="with read_in_place=True; tensors start at the same offset in a page of memory as at the save",
    ),
    Entry(
        "flowstone-arena", "Flowstone through the arena, loads out of phase", "ours", 3, _OURS,
        phases=(PHASE, OTHER_PHASE),
        note="the arena is as large as the state. read_in_place=True, but tensors start at other offsets in a page of "
        "memory than at the save, so loads go through the arena, too",
    ),
    Entry(
        "flowstone-arena-256", "Flowstone through an arena of 256 MiB", "ours", 3, phases=(PHASE, PHASE),
        note="budget_bytes=256 MiB",
    ),
    Entry("flowstone-small", "Flowstone, 50,000 tensors of 4 KiB", "ours", 3, _OURS, 2, shape="small"),
    Entry(
        "flowstone-ranks", "Flowstone, one job of four ranks", "ours", 3, _OURS, ranks=4,
        note="torch.distributed over gloo, with a quarter of every tensor on each rank (fs.Shard), one store and one "
        "commit. With fence='manual', the benchmark itself waits for the capture (fence()). Times are those of the "
        "slowest rank",
    ),
    Entry(
        REPLICAS, "Flowstone, four replicas", "ours", 3,
        tuple(replica_load(condition, how) for condition in CONDITIONS for how in (SHARED, ALONE)),
        ranks=4, replicas=True,
        note="one job over gloo. As under DDP, each rank holds the full state, which has a quarter of the bytes of the "
        "other rows. Rates count these bytes once. *Reads shared* (the default): each byte is read by one rank and "
        "passed on in shared memory. *Each rank for itself*: EngineOptions(share_reads=False). *Through the page "
        "cache*: EngineOptions(direct='off'). With this option, Flowstone normally shares no reads; the benchmark "
        "forces it to share them. *Cached*: all files are in the page cache",
    ),
    Entry("flowstone-posix", "Flowstone, io_uring refused", "ours", 3, _OURS, io_uring=False,
          note="a seccomp filter refuses io_uring from the process's first instruction on"),
)

RIVALS = (
    Entry("torch", "torch.save", "torch_save", 2, ("torch.load", "torch.load(mmap=True)")),
    Entry("torch-plain", "torch.save, no CRC", "torch_save", 2, ("torch.load(mmap=True)",), rounds=_FEWER,
          note="torch.serialization.set_crc32_options(False)"),
    Entry("safetensors", "safetensors", "safetensors_file", 2, ("load_file", "safe_open")),
    Entry("dcp-1", "DCP, 1 thread", "dcp", 2, ("dcp.load",)),
    Entry("dcp-2", "DCP, 2 threads", "dcp", 2, ("dcp.load",)),
    Entry("dcp-async", "DCP async", "dcp", 2, ("dcp.load",)),
    Entry("dcp-flowstone", "DCP through Flowstone", "dcp_flowstone", 2, ("dcp.load",), note=_THROUGH_NOTE),
    Entry("dcp-flowstone-async", "DCP async through Flowstone", "dcp_flowstone", 3, ("dcp.load",), note=_THROUGH_NOTE),
    Entry("dcp-async-best", "DCP async, 2 threads, plans cached", "dcp", 2, ("dcp.load",), rounds=_FEWER),
    Entry("torchsnapshot", "TorchSnapshot take", "torchsnapshot_take", 2, ("restore",), environment="torchsnapshot"),
    Entry("torchsnapshot-async", "TorchSnapshot async_take", "torchsnapshot_take", 2, ("restore",),
          environment="torchsnapshot", note=_ASYNC_NOTE),
    Entry("torchsnapshot-best", "TorchSnapshot take, batching off", "torchsnapshot_take", 2, ("restore",),
          environment="torchsnapshot", rounds=_FEWER, note="TORCHSNAPSHOT_DISABLE_BATCHING=1"),
    Entry("torchsnapshot-each", "TorchSnapshot, one snapshot per tensor", "torchsnapshot_take", 2, ("restore",),
          environment="torchsnapshot", note=_EACH_NOTE),
    Entry("datastates", "DataStates layout (emulation), file per tensor", "datastates_layout", 2, ("read",),
          note=_DATASTATES_NOTE + ". There is one file for each tensor, as Gossman et al. ran the engine"),
    Entry("datastates-section", "DataStates layout (emulation), file per section", "datastates_layout", 2, ("read",),
          rounds=_FEWER, note=_DATASTATES_NOTE + ". There is one file for the model and one for the optimizer"),
    Entry("bytecheckpoint", "ByteCheckpoint", "bytecheckpoint_save", 2, ("load",), environment="bytecheckpoint",
          rounds=_FEWER, note=_BCP_NOTE),
    Entry("bytecheckpoint-best", "ByteCheckpoint fast_saving, 2 workers", "bytecheckpoint_save", 2,
          ("load(fast_loading=True)",), environment="bytecheckpoint", rounds=_FEWER, note=_BCP_NOTE),
    Entry("torch-checkpointing", "torch_checkpointing, sync", "torch_checkpointing_manager", 2, ("load",),
          environment="torch-checkpointing", rounds=_FEWER, note=_TC_NOTE),
    Entry("torch-checkpointing-async", "torch_checkpointing, async, 2 threads", "torch_checkpointing_manager", 2,
          ("load",), environment="torch-checkpointing", rounds=_FEWER, note=_TC_NOTE),
    Entry("orbax", "Orbax", "orbax_pytree", 2, ("restore",), environment="orbax", rounds=_FEWER, note=_ORBAX_NOTE),
    Entry("orbax-best", "Orbax, not compressed", "orbax_pytree", 2, ("restore",), environment="orbax", rounds=_FEWER,
          note=_ORBAX_NOTE + ". use_compression=False"),
)

ENTRIES = FLOWSTONE + RIVALS  # in this order, so that rows with a common goal are measured side by side
SHORT = (OURS, "torch", "safetensors", "dcp-1", "dcp-2", "dcp-async")


def entry(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def open_rival(name: str, directory: Path) -> Rival:
    """The rival, saving below `directory`, which exists and is its own."""
    rival: Rival = import_module(f"bench.rivals.{entry(name).module}").open_rival(name, directory)
    return rival
