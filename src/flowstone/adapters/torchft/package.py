"""Checks that torchft's Manager is known."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from flowstone.adapters.framework import SupportedFramework

TORCHFT = SupportedFramework("torchft", "torchft-nightly==2026.10.26", ("2026.10.26",))
_DISTRIBUTIONS = ("torchft-nightly", "torchft")
_METHODS = {
    "register_state_dict_fn": ("key", "load_state_dict", "state_dict"), "current_step": (), "participating_rank": (),
    "state_dict": (), "load_state_dict": ("state_dict",),
}
"""Methods of Manager that are called, with the names of their parameters."""


def check_manager() -> None:
    """Raise FrameworkError if torchft is not installed, or its Manager has an unknown interface."""
    kind: Any = TORCHFT.load("torchft.manager").Manager
    TORCHFT.check(_version(), _METHODS, kind)


def optimizer_wrapper() -> Any:
    """torchft's class Optimizer, which makes a step only if all replica groups can."""
    return TORCHFT.load("torchft.optim").OptimizerWrapper


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # in some distributions, the package has another name
    return "of an unknown version"
