"""Quantised parameters of packages that do not describe their components themselves: bitsandbytes, TransformerEngine.

Each is a `Provider` of its type, without registration: the packed data and what they are scaled by are parts, each in
the memory of the parameter that is there; how it was quantised has to agree. Types with `__tensor_flatten__`, as those
of torchao, need nothing of this (`split.py`). Nothing else depends on this module but `providers.py`, which asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from flowstone.state.provider import AnyPart, ObjectPart, Part, Provider

_FORM = "quantisation"


class _Parameter(Provider[torch.Tensor]):
    """Derived classes say which tensors a parameter consists of, and how it was quantised."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def form(self, value: Any) -> dict[str, object]:
        """How it was quantised, as plain values."""
        raise NotImplementedError

    def describe(self, value: torch.Tensor) -> Sequence[AnyPart]:
        parts = [Part.of(name, one) for name, one in self.components(value).items()]
        return [*parts, ObjectPart(_FORM, constant=True)]

    def chunks(self, value: torch.Tensor) -> Iterable[object]:
        yield from self.components(value).values()
        yield self.form(value)

    def restore(self, value: torch.Tensor, found: Mapping[str, object]) -> None:
        """Nothing is left to do: all parts are in place."""


class _Params4bit(_Parameter):
    """Packed data, and the tensors of bitsandbytes' QuantState, whose scales may be quantised again."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        state = value.quant_state
        found = {"data": _bare(value)}
        if state is not None:
            found |= {"absmax": state.absmax, "quant_map": state.code}
            if state.nested:
                found |= {"offset": state.offset, "nested_absmax": state.state2.absmax}
                found |= {"nested_quant_map": state.state2.code}
        return found

    def form(self, value: Any) -> dict[str, object]:
        state = value.quant_state
        if state is None:
            return {"quantised": False}
        found = {
            "quantised": True, "quant_type": state.quant_type, "blocksize": state.blocksize, "dtype": state.dtype,
            "shape": state.shape and torch.Size(state.shape),
        }
        if state.nested:
            found |= {"nested_blocksize": state.state2.blocksize, "nested_dtype": state.state2.dtype}
        return found


class _Int8Params(_Parameter):
    """The data. Their scales are an entry of the module's own, as a forward pass moves them into the module."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        return {"data": _bare(value)}

    def form(self, value: Any) -> dict[str, object]:
        return {"has_fp16_weights": bool(value.has_fp16_weights)}


class _Float8Tensor(_Parameter):
    """TransformerEngine's, with one scale. What follows from the data, its transpose, is made anew."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        return {"data": value._data, "scale_inv": value._scale_inv}

    def form(self, value: Any) -> dict[str, object]:
        return {"fp8_dtype": str(value._fp8_dtype), "dtype": value.dtype, "shape": torch.Size(value.shape)}

    def restore(self, value: Any, found: Mapping[str, object]) -> None:
        value._transpose_invalid = True


class _MXFP8Tensor(_Parameter):
    """TransformerEngine's, with a scale for each block, by rows, by columns, or both."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        names = [f"{way}_{what}" for way in ("rowwise", "columnwise") for what in ("data", "scale_inv")]
        found = {name: getattr(value, f"_{name}") for name in names}
        return {name: one for name, one in found.items() if one is not None}

    def form(self, value: Any) -> dict[str, object]:
        return {"fp8_dtype": str(value._fp8_dtype), "dtype": value.dtype, "shape": torch.Size(value.shape)}


_BITSANDBYTES = "bitsandbytes.nn.modules"
_PARAMS4BIT = f"{_BITSANDBYTES}.Params4bit"
_LAYER_8BIT = f"{_BITSANDBYTES}.Linear8bitLt"
_KNOWN: Mapping[str, Callable[[], Provider[torch.Tensor]]] = {
    _PARAMS4BIT: _Params4bit,
    f"{_BITSANDBYTES}.Int8Params": _Int8Params,
    "transformer_engine.pytorch.tensor.float8_tensor.Float8Tensor": _Float8Tensor,
    "transformer_engine.pytorch.tensor.mxfp8_tensor.MXFP8Tensor": _MXFP8Tensor,
}


def provider_of(own: type) -> Provider[torch.Tensor] | None:
    """The provider of a type of these packages; None for one that is not known."""
    return next((make() for name, make in _KNOWN.items() if _is_of(name, own)), None)


def shown_twice(entries: Mapping[str, object]) -> frozenset[str]:
    """Keys of a module's state_dict() for components of quantised parameters: the parameters have them already."""
    whole = tuple(f"{key}." for key, value in entries.items() if _is_of(_PARAMS4BIT, type(value)))
    return frozenset(key for key in entries if key.startswith(whole)) if whole else frozenset()


def scales(module: torch.nn.Module, entries: Mapping[str, object]) -> frozenset[str]:
    """Keys whose tensors are a module's own memory, though no parameter or buffer: the scales of 8-bit layers."""
    found = [key for key in entries if key.rpartition(".")[2] == "SCB"]
    inside = dict(module.named_modules(remove_duplicate=False)) if found else {}
    return frozenset(key for key in found if _is_of(_LAYER_8BIT, type(inside.get(key.rpartition(".")[0]))))


def _is_of(name: str, own: type) -> bool:
    return any(f"{one.__module__}.{one.__qualname__}" == name for one in own.__mro__)


def _bare(value: torch.Tensor) -> torch.Tensor:
    """The parameter's memory as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(torch.Tensor)
