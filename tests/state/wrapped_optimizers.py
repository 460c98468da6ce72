"""Optimizers around others, as they are found in the wild: SAM, Lookahead, schedule-free, clipping, several in one."""

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
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["old"] = one.clone()
                    one.add_(one.grad, alpha=group["rho"])
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.copy_(self.state[one]["old"])
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
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    state.setdefault("z", one.clone())
                    state["z"].sub_(one.grad, alpha=group["lr"])
                    one.lerp_(state["z"], 1 / group["k"])


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
            for one in group["params"]:
                slow = self.state[one].setdefault("slow", one.detach().clone())
                if self.count % 2 == 0:
                    slow.lerp_(one.detach(), 0.5)
                    one.data.copy_(slow)

    def state_dict(self) -> Any:
        own = super().state_dict()
        return {"inner": self.optimizer.state_dict(), "slow": own["state"], "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.param_groups = self.optimizer.param_groups
        owned = [one for group in self.param_groups for one in group["params"]]
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
        torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], self.limit)
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
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for one in self.optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def state_dict(self) -> Any:
        return [one.state_dict() for one in self.optimizers]

    def load_state_dict(self, state_dict: Any) -> None:
        for one, state in zip(self.optimizers, state_dict, strict=True):
            one.load_state_dict(state)
