"""`fs.Replica`, and the events about a replica for `on_event` (docs/REPLICA.md)."""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Replica:
    """`Checkpointer(..., every_step=fs.Replica("train:build"))`: a process beside training that has a copy of the
    state, and replays each journaled step in it. If training is killed, this process saves a full checkpoint of the
    newest step.

    build      "module:function", which makes the state: the function takes no arguments, and returns what training
               gives to `save`, on the host. The module is imported as training would import it. With several ranks,
               each rank's replica calls it, in a gloo group of the replicas
    tolerance  whether to save a state that may differ from training's in some bits, too. Such a save removes the
               journal, from which a machine like training's could have replayed the state exactly
    """

    build: str
    tolerance: bool = False

    def __post_init__(self) -> None:
        module, _, function = self.build.partition(":") if isinstance(self.build, str) else ("", "", "")
        names = [*module.split("."), function]
        if not all(name.isidentifier() for name in names):
            raise ArgumentError(
                f"Replica({self.build!r:.80}) is not the name of a function", expected="'module:function'",
                next="write fs.Replica('train:build')",
            )
        if module == "__main__":
            raise ArgumentError(
                "Replica('__main__:...') cannot be imported in another process",
                next="use the name with which the file is imported: 'train:build' for train.py",
            )


@dataclass(frozen=True, slots=True)
class ReplicaFollows:
    """The replica's state is now that of this step. Emitted for the replica's first step, and whenever `exactness`
    changes.

    exactness     "exact": bit-identical to training's state. "tolerance": it may differ in some bits. See `Replay`
    differs_from  the first step with a different fingerprint
    """

    step: int
    exactness: str
    differs_from: int | None


@dataclass(frozen=True, slots=True)
class ReplicaBehind:
    """The replica is many steps behind training: it has `step`, and training has `newest`. Training does not wait. The
    replica catches up with the next full checkpoint, which it loads.
    """

    step: int
    newest: int


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The replica has ended, or could not be started. Training continues, and every step is still journaled."""

    reason: str


ReplicaEvent = ReplicaFollows | ReplicaBehind | ReplicaLost
