"""Quantised parameters of packages that do not describe their components themselves: bitsandbytes, TransformerEngine.

Each of these types has a `Provider` (it saves and restores values of a type), which need not be registered. The packed
data and their scales are parts, each read into the memory of the existing parameter; the state's and the stored
quantisation must agree. Types with `__tensor_flatten__`, such as torchao's, do not need this module (see
`tensor_subclasses.py`). Only `tensor_subclasses.py` and `module_entries.py` import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from flowstone.providers.provider import AnyPart, ObjectPart, Part, Provider

_FORM = "quantisation"


class _Parameter(Provider[torch.Tensor]):
    """Derived classes define the component tensors of a parameter, and its quantisation settings."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def form(self, value: Any) -> dict[str, object]:
        """How the parameter was quantised, as plain values."""
        raise NotImplementedError

    def describe(self, value: torch.Tensor) -> Sequence[AnyPart]:
        parts = [Part.of(name, component) for name, component in self.components(value).items()]
        return [*parts, ObjectPart(_FORM, constant=True)]

    def chunks(self, value: torch.Tensor) -> Iterable[object]:
        yield from self.components(value).values()
        yield self.form(value)

    def restore(self, value: torch.Tensor, stored: Mapping[str, object]) -> None:
        """Do nothing, as all parts were read into the parameter's memory."""


class _Params4bit(_Parameter):
    """The 4-bit parameter of bitsandbytes: packed data, and the tensors of its QuantState, whose scales may themselves
    be quantised.
    """

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        state = value.quant_state
        components = {"data": _bare(value)}
        if state is not None:
            components |= {"absmax": state.absmax, "quant_map": state.code}
            if state.nested:
                components |= {"offset": state.offset, "nested_absmax": state.state2.absmax}
                components |= {"nested_quant_map": state.state2.code}
        return components

    def form(self, value: Any) -> dict[str, object]:
        state = value.quant_state
        if state is None:
            return {"quantised": False}
        form = {
            "quantised": True, "quant_type": state.quant_type, "blocksize": state.blocksize, "dtype": state.dtype,
            "shape": state.shape and torch.Size(state.shape),
        }
        if state.nested:
            form |= {"nested_blocksize": state.state2.blocksize, "nested_dtype": state.state2.dtype}
        return form


class _Int8Params(_Parameter):
    """The data of bitsandbytes' 8-bit parameter. Its scales are saved as an entry of the module, because a forward
    pass moves them there.
    """

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        return {"data": _bare(value)}

    def form(self, value: Any) -> dict[str, object]:
        return {"has_fp16_weights": bool(value.has_fp16_weights)}


class _Float8Tensor(_Parameter):
    """TransformerEngine's parameter with one scale. The transpose is computed again from the data."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        return {"data": value._data, "scale_inv": value._scale_inv}

    def form(self, value: Any) -> dict[str, object]:
        return {"fp8_dtype": str(value._fp8_dtype), "dtype": value.dtype, "shape": torch.Size(value.shape)}

    def restore(self, value: Any, stored: Mapping[str, object]) -> None:
        value._transpose_invalid = True


class _MXFP8Tensor(_Parameter):
    """TransformerEngine's parameter with a scale for each block, by rows, by columns, or both."""

    def components(self, value: Any) -> dict[str, torch.Tensor]:
        names = [f"{order}_{content}" for order in ("rowwise", "columnwise") for content in ("data", "scale_inv")]
        components = {name: getattr(value, f"_{name}") for name in names}
        return {name: component for name, component in components.items() if component is not None}

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
    """Keys of a module's state_dict() that repeat components of quantised parameters."""
    whole = tuple(f"{key}." for key, value in entries.items() if _is_of(_PARAMS4BIT, type(value)))
    return frozenset(key for key in entries if key.startswith(whole)) if whole else frozenset()


def scales(module: torch.nn.Module, entries: Mapping[str, object]) -> frozenset[str]:
    """Keys of a module's state_dict() whose tensors are the module's own memory although they are neither parameters
    nor buffers: the scales of 8-bit layers.
    """
    keys = [key for key in entries if key.rpartition(".")[2] == "SCB"]
    inside = dict(module.named_modules(remove_duplicate=False)) if keys else {}
    return frozenset(key for key in keys if _is_of(_LAYER_8BIT, type(inside.get(key.rpartition(".")[0]))))


def _is_of(name: str, own: type) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in own.__mro__)


def _bare(value: torch.Tensor) -> torch.Tensor:
    """The parameter's memory as an ordinary torch.Tensor, not of the parameter's subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(torch.Tensor)
