"""The error for a state that changed, or whose memory went away, before it was captured."""

from __future__ import annotations

from flowstone.config import NAMES_TOLD
from flowstone.errors import StateChangedError


def state_changed(
    names: tuple[str, ...], *, path: str, offset: int = 0, length: int = 0, gone: bool = False
) -> StateChangedError:
    """The error that names these tensors."""
    told = ", ".join(names[:NAMES_TOLD]) + f" and {len(names) - NAMES_TOLD} more" * (len(names) > NAMES_TOLD)
    if gone:
        what = f"the memory of {told} went away"
        remedy = "call fence() before you share, resize or free memory that is being saved"
    else:
        what = f"{told} changed"
        remedy = "put the optimizer that changes them into the state, or call fence() before you change them"
    was = "it was" if len(names) == 1 or gone else "they were"
    return StateChangedError(
        f"{what} before {was} captured", path=path, offset=offset, length=length, names=names, gone=gone, next=remedy
    )
