"""The frameworks that adapters stand in: whether one is installed, and whether its interface is one that is known."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from flowstone.errors import FrameworkError
from flowstone.log import log


@dataclass(frozen=True, slots=True)
class Framework:
    """A package that an adapter stands in.

    package  as it is imported
    install  what `pip install` takes
    known    versions that the adapter is tested with, the newest last
    """

    package: str
    install: str
    known: tuple[str, ...]

    def load(self, module: str) -> ModuleType:
        """Import a module of it. Raises FrameworkError if it is not installed, or cannot be imported."""
        try:
            return import_module(module)
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            absent = isinstance(error, ModuleNotFoundError) and missing == self.package
            raise FrameworkError(
                f"{self.package} is not installed" if absent else f"{module} cannot be imported",
                **({} if absent else {"found": f"{type(error).__name__}: {error}"}),
                next=f"pip install {self.install}",
            ) from error

    def check(self, version: str, methods: Mapping[str, Sequence[str]], kind: type) -> None:
        """Accept a version that is known, and any other one whose methods take what the known ones take.

        methods  of `kind` that the adapter replaces or calls, with the names of their parameters
        raises   FrameworkError naming each method that differs
        """
        if version in self.known:
            return
        changed = [text for name, names in methods.items() if (text := _difference(kind, name, names))]
        known = ", ".join(self.known)
        if changed:
            raise FrameworkError(
                f"{self.package} {version} has an interface that this adapter does not know",
                changed="\n".join(changed), known=known, next=f"pip install {self.package}=={self.known[-1]}",
            )
        log.warning(
            "%s %s is not a version that Flowstone's adapter was tested with (%s); its interface is the same, "
            "so the adapter goes on", self.package, version, known,
        )


def _difference(kind: type, name: str, names: Sequence[str]) -> str:
    """How a method differs from what is known; "" if every call of the known form means the same."""
    method = getattr(kind, name, None)
    if method is None:
        return f"{kind.__name__}.{name} is gone"
    found = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
    first = [one.name for one in found[: len(names)] if one.kind <= one.POSITIONAL_OR_KEYWORD]
    rest = [one for one in found[len(names) :] if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    required = [one for one in rest if one.default is one.empty]
    if first == list(names) and not required:
        return ""
    taken = inspect.Signature([one.replace(annotation=one.empty, default=one.empty) for one in found])
    return f"{kind.__name__}.{name}{taken}, known with ({', '.join(names)})"
