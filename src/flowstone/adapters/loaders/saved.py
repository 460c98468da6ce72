"""What every adapter of a loader does with its state: is it of this kind of loader, and of the same data?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, cast

from flowstone.errors import FrameworkError, StateError

OTHER_ORDER = (
    "give the loader the data and the sampler that it had at the save; otherwise some samples would be trained on "
    "twice, and others never. To begin the data anew, load without this section"
)


def require_known(package: str, known: tuple[str, ...]) -> str:
    """The version of a package that is installed.

    raises  FrameworkError  its states may have another structure than those of `known` versions
    """
    found = metadata.version(package).partition("+")[0]
    if found not in known:
        raise FrameworkError(
            f"the loaders' states of {package} {found} are not known to Flowstone", known=", ".join(known),
            next=f"pip install {package}=={known[-1]}, or hand over the loader itself, without resumable()",
        )
    return found


def state_of(state: object, kind: str, versions: tuple[str, ...]) -> dict[str, Any]:
    """A state that the adapter for this kind of loader has saved.

    raises  StateError  it is of something else, or of a version that is not known
    """
    found = state.get("kind") if isinstance(state, Mapping) else None
    if found != kind:
        raise StateError(
            "this section was saved for another kind of loader", expected=f"{kind}, saved through resumable()",
            found=found if isinstance(found, str) else f"{_shape(state)}, not saved through resumable()",
            next="hand over a loader of the kind that was saved; without resumable() if it was saved without",
        )
    taken = cast("dict[str, Any]", state)
    if taken["version"] not in versions:
        raise StateError(
            f"this section was saved with a version of {kind} that is not known", found=taken["version"],
            known=", ".join(versions), next="load it with the version of Flowstone that has saved it",
        )
    return taken


def _shape(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a dict with {', '.join(sorted(map(repr, state))[:5]) or 'no keys'}"
    return f"a {type(state).__name__}"


def refuse_changes(saved: Mapping[str, object], now: Mapping[str, object], names: Iterable[str], next: str) -> None:
    """Raise StateError naming each of `names` whose value is another one now than at the save."""
    changed = [f"{name}: {saved[name]!r} at the save, {now[name]!r} now" for name in names if saved[name] != now[name]]
    if changed:
        raise StateError("the loader is not the one that was saved", changed="\n".join(changed), next=next)


def refuse_disagreement(made_of: Sequence[Mapping[str, object]], names: Iterable[str]) -> None:
    """Raise StateError if the ranks that saved differ in one of `names`."""
    for name in names:
        found = [one[name] for one in made_of]
        if any(value != found[0] for value in found):
            raise StateError(
                f"the loaders of the ranks that saved differ in their {name}, so their data cannot be divided among "
                "other ranks", found=repr(found), next="load on the number of ranks that saved",
            )
