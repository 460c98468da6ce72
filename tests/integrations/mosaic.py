"""MosaicML's streaming on a machine without CUDA: the package, and a data set of numbers on the disk."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def streaming() -> Any:
    """The package. It imports torchvision for its data sets of images, which no test uses: where it is not installed,
    an empty one stands in its place while streaming is imported.
    """
    if "streaming" in sys.modules or find_spec("torchvision") is not None:
        import streaming

        return streaming
    from transformers import BatchEncoding, BatchFeature  # noqa: F401  # streaming's, which look for a real torchvision

    given: dict[str, Any] = {name: ModuleType(name) for name in _OF_IMAGES}
    given["torchvision.datasets"].VisionDataset = object
    given["torchvision.transforms.functional"].to_tensor = None
    sys.modules |= given
    try:
        import streaming
    finally:
        for name in given:
            del sys.modules[name]
    return streaming


_OF_IMAGES = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")


def write_numbers(directory: Path, count: int) -> None:
    """A data set of numbers from 0 on, in several shards."""
    with streaming().MDSWriter(out=str(directory), columns={"number": "int"}, size_limit=400) as writer:
        for number in range(count):
            writer.write({"number": number})
