"""How a checkpoint is displayed in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Protocol

_SHOWN = 20


class NotebookEntry(Protocol):
    """The attributes of a tensor that the table in a notebook shows. The values of `Checkpoint.tensors` have these
    attributes.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...


def as_html(line: str, tensors: Sequence[NotebookEntry], failure: str = "") -> str:
    """HTML with `line`, and a table of the largest tensors; or `failure`, the reason why there is no table."""
    line = f"<p><code>{html.escape(line)}</code></p>"
    if failure:
        return f"{line}<p>{html.escape(failure)}</p>"
    largest = sorted(tensors, key=lambda entry: -entry.bytes)
    rows = "".join(
        f"<tr><td>{html.escape(tensor.name)}</td><td>{tensor.dtype}</td><td>{tensor.shape}</td>"
        f"<td>{tensor.bytes / 1e6:,.3f}</td></tr>"
        for tensor in largest[:_SHOWN]
    )
    rest = len(largest) - _SHOWN
    more = f"<p>and {rest} smaller ones: list(checkpoint.tensors)</p>" if rest > 0 else ""
    head = "<tr><th>tensor</th><th>dtype</th><th>shape</th><th>MB</th></tr>"
    return f"{line}<table>{head}{rows}</table>{more}"
