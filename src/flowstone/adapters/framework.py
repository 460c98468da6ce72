"""Checks whether the framework of an adapter is installed, and has a known interface."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from flowstone.errors import FrameworkError
from flowstone.log import log


@dataclass(frozen=True, slots=True)
class SupportedFramework:
    """A framework for which there is an adapter.

    package  the name under which the framework is imported
    install  the requirement for `pip install`
    tested_versions  the versions with which the adapter was tested, the newest last
    """

    package: str
    install: str
    tested_versions: tuple[str, ...]

    def load(self, module: str) -> ModuleType:
        """Import a module of the package. Raises FrameworkError if it is not installed, or cannot be imported."""
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
        """Raise an error unless the version is known, or the methods take the same parameters as in known versions.

        methods  methods of `kind` that the adapter replaces or calls, with the names of their parameters
        raises   FrameworkError  methods differ; the error names each of them
        """
        if version in self.tested_versions:
            return
        changed = [text for name, names in methods.items() if (text := _difference(kind, name, names))]
        versions = ", ".join(self.tested_versions)
        if changed:
            raise FrameworkError(
                f"the interface of {self.package} {version} is unknown to this adapter",
                changed="\n".join(changed), known=versions,
                next=f"pip install {self.package}=={self.tested_versions[-1]}",
            )
        log.warning(
            "Flowstone's adapter was not tested with %s %s (tested: %s); its interface is the same, "
            "so the adapter continues", self.package, version, versions,
        )


def _difference(kind: type, name: str, names: Sequence[str]) -> str:
    """How a method differs from the known form. "" if calls of the known form still work."""
    method = getattr(kind, name, None)
    if method is None:
        return f"{kind.__name__}.{name} does not exist"
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    first = [p.name for p in parameters[: len(names)] if p.kind <= p.POSITIONAL_OR_KEYWORD]
    rest = [p for p in parameters[len(names) :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p for p in rest if p.default is p.empty]
    if first == list(names) and not required:
        return ""
    taken = inspect.Signature([p.replace(annotation=p.empty, default=p.empty) for p in parameters])
    return f"{kind.__name__}.{name}{taken}, expected ({', '.join(names)})"
