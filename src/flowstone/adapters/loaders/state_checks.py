"""Checks that several adapters of loaders use: whether a state is of the same kind of loader, and of the same data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, cast

from flowstone.errors import FrameworkError, StateError

OTHER_ORDER = (
    "use the same data and sampler as at the save; otherwise some samples would be repeated, and others skipped. "
    "To start the data from the beginning, load without this section"
)


def require_known_version(package: str, versions: tuple[str, ...]) -> str:
    """The installed version of a package.

    raises  FrameworkError  the version is not one of `versions`, so the loader's states may have another structure
    """
    version = metadata.version(package).partition("+")[0]
    if version not in versions:
        raise FrameworkError(
            f"resumable() does not know the loader states of {package} {version}", known=", ".join(versions),
            next=f"pip install {package}=={versions[-1]}, or put the loader into the state without resumable()",
        )
    return version


def checked_state(state: object, kind: str, versions: tuple[str, ...]) -> dict[str, Any]:
    """Return the state, after a check that the adapter for this kind of loader has saved it.

    raises  StateError  the state is of another kind of loader, or of an unknown version
    """
    saved_kind = state.get("kind") if isinstance(state, Mapping) else None
    if saved_kind != kind:
        raise StateError(
            "this section was saved for another kind of loader", expected=f"{kind}, saved through resumable()",
            found=saved_kind if isinstance(saved_kind, str) else f"{_shape(state)}, not saved through resumable()",
            next="give a loader of the saved kind, and wrap it in resumable() only if the saved loader was wrapped",
        )
    taken = cast("dict[str, Any]", state)
    if taken["version"] not in versions:
        raise StateError(
            f"this section was saved with an unknown version of {kind}", found=taken["version"],
            known=", ".join(versions), next="load it with the version of Flowstone that saved it",
        )
    return taken


def _shape(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a dict with {', '.join(sorted(map(repr, state))[:5]) or 'no keys'}"
    return f"a {type(state).__name__}"


def refuse_changes(saved: Mapping[str, object], now: Mapping[str, object], names: Iterable[str], next: str) -> None:
    """Raise StateError if values have changed since the save. The error names each of `names` that differs between
    `saved` and `now`.
    """
    changed = [f"{name}: {saved[name]!r} at the save, {now[name]!r} now" for name in names if saved[name] != now[name]]
    if changed:
        raise StateError("the loader differs from the saved one", changed="\n".join(changed), next=next)


def refuse_disagreement(made_of: Sequence[Mapping[str, object]], names: Iterable[str]) -> None:
    """Raise StateError if the ranks that saved have different values for one of `names`."""
    for name in names:
        values = [loader[name] for loader in made_of]
        if any(value != values[0] for value in values):
            raise StateError(
                f"the loaders of the ranks that saved differ in their {name}, so their data cannot be divided among "
                "other ranks", found=repr(values), next="load with as many ranks as saved",
            )
