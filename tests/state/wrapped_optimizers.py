"""Optimizers around others, as real code has them: SAM, Lookahead, schedule-free, clipping, several in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim


class SAM(optim.Optimizer):
    """Sharpness-aware minimisation: a step up, then one of the base optimizer (arXiv 2010.01412)."""

    def __init__(self, parameters: Iterable[torch.Tensor], base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old"] = param.clone()
                    param.add_(param.grad, alpha=group["rho"])
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(self.state[param]["old"])
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class ScheduleFree(optim.Optimizer):
    """Weights at one of two points, with the other and a count beside them (arXiv 2405.15682)."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("z", param.clone())
                    state["z"].sub_(param.grad, alpha=group["lr"])
                    param.lerp_(state["z"], 1 / group["k"])


class Lookahead(optim.Optimizer):
    """Slow weights, every second step; the state is that of the optimizer inside, and its own (arXiv 1907.08610)."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if self.count % 2 == 0:
                    slow.lerp_(param.detach(), 0.5)
                    param.data.copy_(slow)

    def state_dict(self) -> Any:
        own = super().state_dict()
        return {"inner": self.optimizer.state_dict(), "slow": own["state"], "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.param_groups = self.optimizer.param_groups
        owned = [param for group in self.param_groups for param in group["params"]]
        self.count = state_dict["count"]
        for number, slots in state_dict["slow"].items():
            self.state[owned[number]] = dict(slots)


class Clipping:
    """Hands everything on, and clips before each step."""

    def __init__(self, optimizer: optim.Optimizer, limit: float) -> None:
        self.optimizer, self.limit = optimizer, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], self.limit)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class Several:
    """One for matrices, one for the rest."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> Any:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, state_dict: Any) -> None:
        for optimizer, state in zip(self.optimizers, state_dict, strict=True):
            optimizer.load_state_dict(state)
