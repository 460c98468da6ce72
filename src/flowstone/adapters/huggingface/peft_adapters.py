"""PEFT: saves the adapters of a model without its base model, and the identity of that base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from flowstone.errors import MismatchError
from flowstone.format.digest import digest
from flowstone.log import log
from flowstone.reading.checkpoint import Checkpoint
from flowstone.torch.fsdp2 import with_shards

_WRAPPED = re.compile(r"\.(base_layer|original_module)(?=\.)")


@dataclass(frozen=True, slots=True)
class BaseModelIdentity:
    """Identifies the base weights of adapters.

    name    PEFT's name for the base model
    digest  digest of the names, types, shapes and bytes of all base weights; "" if some of these are not plain tensors
            in this process
    """

    name: str
    digest: str

    def is_other_than(self, stored: BaseModelIdentity) -> bool:
        if self.digest and stored.digest:
            return self.digest != stored.digest  # names are not compared, as the same model can have several
        return bool(self.name and stored.name) and self.name != stored.name

    def __str__(self) -> str:
        return f"{self.name or 'unnamed'}, {f'digest {self.digest}' if self.digest else 'not digested'}"


class BaseModels:
    """The base models of a run's models. The digest of each is computed once, as its weights are frozen, and may have
    many gigabytes.
    """

    def __init__(self) -> None:
        self._identities: dict[int, tuple[nn.Module, BaseModelIdentity]] = {}

    def sections(self, model: nn.Module, number: int = 0) -> dict[str, object]:
        """The sections of a model. For a PEFT model, these are its adapters and the identity of its base."""
        suffix = f"_{number}" if number else ""
        inner = unwrapped(model)
        if not is_peft(inner):
            return {f"model{suffix}": model}
        adapters, rest = _split_adapters(inner)
        if id(model) not in self._identities:
            self._identities[id(model)] = model, BaseModelIdentity(_name_of(inner), _digest_of(rest))
        return {f"model{suffix}": adapters, f"base{suffix}": self._identities[id(model)][1]}


def to_save(sections: Mapping[str, object]) -> dict[str, object]:
    """The same sections, in which identities of bases are replaced by plain values."""
    return {name: asdict(value) if isinstance(value, BaseModelIdentity) else value for name, value in sections.items()}


def to_load(sections: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, object]:
    """The same sections without the identities of bases, which are only compared with those in `checkpoint`.

    raises  MismatchError  the adapters in `checkpoint` belong to another base model
    """
    for name, base in sections.items():
        stored_base = checkpoint.objects.get(name)
        if isinstance(base, BaseModelIdentity) and isinstance(stored_base, dict) and base.is_other_than(
            stored := _stored_base(stored_base)
        ):
            raise MismatchError(
                f"the adapters in {checkpoint.path} belong to another base model",
                stored=stored, wanted=base,
                next="load the base model that the adapters were trained on, with the same dtype",
            )
    return {name: value for name, value in sections.items() if not isinstance(value, BaseModelIdentity)}


def is_peft(model: object) -> bool:
    """Whether this is a PEFT model. Does not import PEFT."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(model).__mro__) and hasattr(
        model, "peft_config"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of the wrappers of DDP and torch.compile."""
    inner = getattr(model, "module", getattr(model, "_orig_mod", None))
    return unwrapped(inner) if isinstance(inner, nn.Module) and not is_peft(model) else model


def _name_of(model: Any) -> str:
    return next((str(config.base_model_name_or_path or "") for config in model.peft_config.values()), "")


def _split_adapters(model: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Split a model into its adapters and its base. Returns the adapters as a module that has the model's own tensors,
    and all other tensors by name.

    Adapters are the tensors that PEFT itself would save, trained or not, and all others that training changes:
    trained parameters, and buffers such as BatchNorm statistics.
    """
    from peft import get_peft_model_state_dict

    model = with_shards(model)  # its state_dict() does not access parameters that another thread has gathered
    saved = {
        (tensor.data_ptr(), tuple(tensor.shape)) for adapter in model.peft_config
        for tensor in get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False).values()
        if tensor.numel()
    }
    changing = _changing_buffers(model)
    adapters, rest = nn.Module(), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad or id(tensor) in changing or (tensor.data_ptr(), tuple(tensor.shape)) in saved:
            _put(adapters, name, tensor)
        else:
            rest[name] = tensor
    return adapters, rest


def _changing_buffers(model: nn.Module) -> set[int]:
    """The ids of the buffers that training may change. These are all buffers, except those of layers whose weight is a
    buffer, too.

    Layers of GPTQ and AWQ have packed integers and their scales as buffers, which are frozen, and as large as the base.
    Other quantized layers add entries that are not buffers to a state dict.
    """
    buffers_of = [dict(module.named_buffers(recurse=False)) for module in model.modules()]
    return {id(buffer) for buffers in buffers_of if not _has_packed_weight(buffers) for buffer in buffers.values()}


def _has_packed_weight(buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether a layer's weight is one of its buffers, judged by names that PEFT uses, too."""
    return any(name in buffers and _is_packed(buffers[name]) for name in ("qweight", "weight"))


def _is_packed(weight: torch.Tensor) -> bool:
    kind = weight.dtype
    eight_bits = kind.itemsize == 1 and kind is not torch.bool
    is_integer = not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
    return weight.ndim > 1 and (eight_bits or is_integer)


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor directly into the module's dicts, since the name of an adapter may equal that of a method."""
    *path, last = name.split(".")
    for part in path:
        module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[last] = tensor
    else:
        module._buffers[last] = tensor


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    lines = []
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
            kind = type(tensor).__qualname__
            log.info(
                "loads will not check that the adapters belong to this base model: no digest can be computed of %s, a "
                "%s on %s", name, kind, tensor.device,
            )
            return ""
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        plain = _WRAPPED.sub("", name)  # the same name, whichever layers have adapters
        lines.append(f"{plain} {tensor.dtype} {tuple(tensor.shape)} {digest(content)}")
    return digest("\n".join(sorted(lines)).encode())


def _stored_base(stored: Mapping[str, object]) -> BaseModelIdentity:
    return BaseModelIdentity(str(stored.get("name", "")), str(stored.get("digest", "")))
