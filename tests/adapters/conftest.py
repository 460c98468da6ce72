"""Fixtures of the tests of adapters."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

sys.path.append(str(Path(__file__).resolve().parent.parent / "ranks"))  # processes.py, which makes ranks

_OLD = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 7)
_LACKING = {
    "fsdp2_on_cpu": _OLD,
    "cached_plans": "enable_plan_caching" not in inspect.signature(dcp.DefaultSavePlanner).parameters,
    "staging_futures": not hasattr(dcp.state_dict_saver, "AsyncSaveResponse"),
    "use_collectives": "use_collectives" not in inspect.signature(dcp.save).parameters,
    "loads_of_everything": _OLD,
}
"""What the oldest torch has not got, and the tests of it need."""


@pytest.fixture
def needs(request: pytest.FixtureRequest) -> None:
    """Skips a test whose parameter, given indirectly, names what this torch lacks."""
    if _LACKING[request.param]:
        pytest.skip(f"torch {torch.__version__} has no {request.param}")
