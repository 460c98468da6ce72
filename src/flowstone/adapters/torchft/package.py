"""The package of torchft: whether it is one whose Manager is known."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from flowstone.adapters.framework import Framework

TORCHFT = Framework("torchft", "torchft-nightly==2026.10.26", ("2026.10.26",))
_DISTRIBUTIONS = ("torchft-nightly", "torchft")
_METHODS = {
    "register_state_dict_fn": ("key", "load_state_dict", "state_dict"), "current_step": (), "participating_rank": (),
    "state_dict": (), "load_state_dict": ("state_dict",),
}
"""Of Manager, with the names of their parameters: what is called."""


def check_manager() -> None:
    """Raise FrameworkError if torchft is missing, or of a version whose Manager has another interface."""
    kind: Any = TORCHFT.load("torchft.manager").Manager
    TORCHFT.check(_version(), _METHODS, kind)


def optimizer_wrapper() -> Any:
    """torchft's class of optimizers, which step if all replica groups could."""
    return TORCHFT.load("torchft.optim").OptimizerWrapper


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
