"""A quantised tensor type like those of libraries: int8 codes, and a scale for each row.

An optimizer keeps its moments in it. It computes in its nominal dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class RowInt8(torch.Tensor):
    """A matrix as int8 codes and one float32 scale for each row."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, signed: bool = True) -> RowInt8:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[return-value]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, signed: bool = True) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    @classmethod
    def of(cls, value: torch.Tensor) -> RowInt8:
        scale = value.detach().float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((value.detach() / scale).round().to(torch.int8), scale, value.dtype)

    def dequantised(self) -> torch.Tensor:
        return (self.codes.float() * self.scale).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], {"dtype": self.dtype, "signed": self.signed}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: object, outer_stride: object
    ) -> RowInt8:
        return RowInt8(inner["codes"], inner["scale"], context["dtype"], context["signed"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowInt8({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., object], _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].codes, args[0].scale, args[0].dtype, args[0].signed)
        if func is aten.copy_.default and isinstance(args[0], cls):
            made = cls.of(args[1].dequantised() if isinstance(args[1], cls) else args[1])
            args[0].codes.copy_(made.codes)
            args[0].scale.copy_(made.scale)
            return args[0]
        plain = lambda value: value.dequantised() if isinstance(value, cls) else value  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Momentum8(torch.optim.Optimizer):
    """SGD whose momenta of matrices are RowInt8, created at the first step, like those of low-bit optimizers."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter)
                    state["momentum"] = RowInt8.of(zeros) if zeros.dim() == 2 else zeros
                    state["steps"] = 0
                state["steps"] += 1
                momentum = state["momentum"]
                quantised = isinstance(momentum, RowInt8)
                new = (momentum.dequantised() if quantised else momentum) * 0.9 + parameter.grad
                momentum.copy_(new)
                parameter.sub_(new, alpha=group["lr"])


class Net(torch.nn.Module):
    """A frozen quantised layer below a trained one, like adapters on quantised models."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(6, 5)
        self.base.weight = torch.nn.Parameter(RowInt8.of(self.base.weight), requires_grad=False)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.base(x)))
