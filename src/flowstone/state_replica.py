"""`fs.Replica`, and what a Checkpointer tells of it to its `on_event` (docs/REPLICA.md)."""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Replica:
    """`Checkpointer(..., every_step=fs.Replica("train:build"))`: a process beside training that has the state, too, and
    brings it to each step that the journal gets. When training is killed, it saves the newest step whole.

    build      "module:function", by which it makes the state: the function takes nothing, and returns what training
               gives to `save`, on the host. The module is imported as training would import it. Of several ranks each
               calls it, in a gloo group of their replicas
    tolerance  save also a state that is not proven to be the training's bit for bit. That removes the journal, from
               which a machine like the training's could have replayed it exactly
    """

    build: str
    tolerance: bool = False

    def __post_init__(self) -> None:
        module, _, function = self.build.partition(":") if isinstance(self.build, str) else ("", "", "")
        names = [*module.split("."), function]
        if not all(name.isidentifier() for name in names):
            raise ArgumentError(
                f"Replica({self.build!r:.80}) names no function", expected="'module:function'",
                next="write fs.Replica('train:build')",
            )
        if module == "__main__":
            raise ArgumentError(
                "Replica('__main__:...') names a module that another process does not have",
                next="give the name by which that file is imported: 'train:build' for train.py",
            )


@dataclass(frozen=True, slots=True)
class ReplicaFollows:
    """The replica of the state has come to this step, the first one that it tells of; or its class is another one now.

    exactness     "exact": every fingerprint was that of the training; else "tolerance". See `Replay`
    differs_from  the first step with another fingerprint
    """

    step: int
    exactness: str
    differs_from: int | None


@dataclass(frozen=True, slots=True)
class ReplicaBehind:
    """The replica lacks many steps. Training does not wait; the next checkpoint brings it near at the latest."""

    step: int
    newest: int


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """There is no replica any more, or none came to be. Training goes on, and every step is in the journal, as ever."""

    reason: str


ReplicaEvent = ReplicaFollows | ReplicaBehind | ReplicaLost
