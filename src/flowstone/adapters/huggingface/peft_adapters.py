"""PEFT: the adapters of a model without its base, and which base they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from flowstone.checkpoint import Checkpoint
from flowstone.errors import MismatchError
from flowstone.format.digest import digest
from flowstone.log import log
from flowstone.state.fsdp2 import with_shards

_WRAPPED = re.compile(r"\.(base_layer|original_module)(?=\.)")


@dataclass(frozen=True, slots=True)
class Base:
    """The weights that adapters belong to.

    name    what PEFT calls them
    digest  of all of them: names, types, shapes and bytes; "" where this process does not hold them as plain tensors
    """

    name: str
    digest: str

    def is_other_than(self, stored: Base) -> bool:
        if self.digest and stored.digest:
            return self.digest != stored.digest  # one model has many names
        return bool(self.name and stored.name) and self.name != stored.name

    def __str__(self) -> str:
        return f"{self.name or 'unnamed'}, {f'digest {self.digest}' if self.digest else 'not digested'}"


class Bases:
    """The bases of a run's models. Each is read once: its weights are frozen, and may be many gigabytes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, Base]] = {}

    def sections(self, model: nn.Module, number: int = 0) -> dict[str, object]:
        """The sections of a model: itself, or of a PEFT model its adapters and their base."""
        suffix = f"_{number}" if number else ""
        inner = unwrapped(model)
        if not is_peft(inner):
            return {f"model{suffix}": model}
        adapters, rest = _parted(inner)
        if id(model) not in self._known:
            self._known[id(model)] = model, Base(_name_of(inner), _digest_of(rest))
        return {f"model{suffix}": adapters, f"base{suffix}": self._known[id(model)][1]}


def to_save(sections: Mapping[str, object]) -> dict[str, object]:
    """Sections with bases as plain values."""
    return {name: asdict(value) if isinstance(value, Base) else value for name, value in sections.items()}


def to_load(sections: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, object]:
    """Sections without bases, which are only compared.

    raises  MismatchError where the adapters in `checkpoint` belong to another base than that of the model that is here
    """
    for name, base in sections.items():
        found = checkpoint.objects.get(name)
        if isinstance(base, Base) and isinstance(found, dict) and base.is_other_than(stored := _of(found)):
            raise MismatchError(
                f"the adapters in {checkpoint.path} belong to another base model", stored=stored, wanted=base,
                next="load the base that they were trained on, with the same dtype",
            )
    return {name: value for name, value in sections.items() if not isinstance(value, Base)}


def is_peft(model: object) -> bool:
    """Whether PEFT has made it; without an import of PEFT, which a model of another kind does not need."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(model).__mro__) and hasattr(
        model, "peft_config"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Without DDP and torch.compile around it."""
    inner = getattr(model, "module", getattr(model, "_orig_mod", None))
    return unwrapped(inner) if isinstance(inner, nn.Module) and not is_peft(model) else model


def _name_of(model: Any) -> str:
    return next((str(one.base_model_name_or_path or "") for one in model.peft_config.values()), "")


def _parted(model: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The adapters, as a module with the model's own tensors under their names in it; and the base: all other tensors.

    Adapters are what PEFT saves as such, trained or not, and whatever else training changes: what is trained, and
    buffers, such as the statistics of BatchNorm.
    """
    from peft import get_peft_model_state_dict

    model = with_shards(model)  # whose state_dict() leaves alone what a pass on another thread has gathered
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
    """The ids of buffers that training may change: all but those of a layer whose weight is a buffer.

    GPTQ's and AWQ's layers hold packed integers and their scales as buffers: frozen, and as large as the base. What
    other quantised layers add to a state dict is no buffer of a module.
    """
    held = [dict(module.named_buffers(recurse=False)) for module in model.modules()]
    return {id(one) for buffers in held if not _has_packed_weight(buffers) for one in buffers.values()}


def _has_packed_weight(buffers: Mapping[str, torch.Tensor]) -> bool:
    """Whether a layer's weight is one of its buffers. Its name is one of those under which PEFT, too, finds weights."""
    return any(name in buffers and _is_packed(buffers[name]) for name in ("qweight", "weight"))


def _is_packed(weight: torch.Tensor) -> bool:
    kind = weight.dtype
    eight_bits = kind.itemsize == 1 and kind is not torch.bool
    is_integer = not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
    return weight.ndim > 1 and (eight_bits or is_integer)


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Into the dicts themselves: names of adapters may be those of a module's methods."""
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
            log.info("the base of the adapters is not digested: %s is a %s on %s", name, kind, tensor.device)
            return ""
        held = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        plain = _WRAPPED.sub("", name)  # whichever layers have adapters
        lines.append(f"{plain} {tensor.dtype} {tuple(tensor.shape)} {digest(held)}")
    return digest("\n".join(sorted(lines)).encode())


def _of(found: Mapping[str, object]) -> Base:
    return Base(str(found.get("name", "")), str(found.get("digest", "")))
