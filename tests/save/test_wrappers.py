"""Optimizers inside others: wrappers, containers, and methods that change weights like a step."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowstone as fs
from flowstone.events.phases import Captured, Event
from lagging_loops import MIB, backward, failure, network, waiting


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's: a torch optimizer by its class that was never initialized as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Scheduled:
    """As "The Annotated Transformer" has it: an object of one's own around an optimizer, which it changes behind."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] *= 0.9
            for parameter in group["params"]:
                parameter.data.mul_(0.99)  # before the step inside: a hook there would come too late
        self._optimizer.step()

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._optimizer.load_state_dict(state_dict)


class Steps:
    """Steps the optimizers of several parts."""

    __slots__ = ("__dict__",)

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> Any:
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("param_groups")  # if one asks it by torch's names


class Container(Steps):
    """Nothing but several."""


class Flattened(torch.optim.Optimizer):
    """As torchtitan's: one of torch's by its class, with groups that are not stepped, and a state_dict() by names."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for opt in optimizers for group in opt.param_groups for p in group["params"]], {"lr": 1.0})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> Any:
        return {f"{i}.{number}.{key}": value for i, optimizer in enumerate(self.optimizers)
                for number, slots in optimizer.state_dict()["state"].items() for key, value in slots.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


class Unyielding(Steps):
    """No reference to it can be weak, so that no hook would go when it goes."""

    __slots__ = ()


def moments(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def container(model: nn.Sequential) -> Container:
    return Container([moments(model[:2]), moments(model[2:])])


WRAPPERS: dict[str, Callable[[nn.Sequential], Any]] = {
    "bare": moments,
    "Accelerate's": lambda model: Accelerated(moments(model)),
    "one's own": lambda model: Scheduled(moments(model)),
    "one in another": lambda model: Scheduled(Accelerated(moments(model))),
    "a container": container,
    "a flattened container": lambda model: Flattened(list(container(model))),
    "a container of wrappers": lambda model: Container([Accelerated(value) for value in container(model)]),
}


def trained(make: Callable[[nn.Sequential], Any], seed: int = 0) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(seed)
    model = network()
    optimizer = make(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("how", WRAPPERS)
def test_a_step_of_an_optimizer_inside_of_another_waits_and_nothing_of_it_is_captured_early(
    tmp_path: Path, how: str
) -> None:
    model, optimizer = trained(WRAPPERS[how])
    events: list[Event] = []
    with waiting(tmp_path, on_event=events.append) as checkpointer:
        for step in (1, 2, 3):
            expected = plain(model)
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            assert not save.captured.done()
            backward(model)
            optimizer.step()
            assert failure(save) is None
            checkpoint = fs.open(tmp_path, step=step)
            assert all(torch.equal(checkpoint.read(f"model.{name}"), tensor) for name, tensor in expected.items())
    assert {event.early_bytes // MIB for event in events if isinstance(event, Captured)} == {0}


@pytest.mark.parametrize(("source", "target"), [
    ("bare", "Accelerate's"), ("Accelerate's", "bare"), ("one's own", "bare"), ("bare", "one in another"),
    ("a container", "a container of wrappers"), ("a flattened container", "a container"),
    ("a container", "a flattened container"), ("a container of wrappers", "bare"),
])
def test_each_loads_what_any_other_has_saved(tmp_path: Path, source: str, target: str) -> None:
    model, optimizer = trained(WRAPPERS[source])
    other, into = trained(WRAPPERS[target], seed=1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).committed.result()
        parts = "container" in source, "container" in target
        if parts[0] is not parts[1]:
            with pytest.raises(fs.MismatchError, match="param_groups"):  # which has groups of other members
                checkpointer.load({"model": other, "optimizer": into})
            return
        checkpointer.load({"model": other, "optimizer": into})
    for net, stepped in ((model, optimizer), (other, into)):
        torch.manual_seed(5)
        backward(net)
        stepped.step()
    if "own" not in source + target and "another" not in source + target:  # which has changed the weights by itself
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_cannot_be_made_to_wait_is_captured_early_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = Unyielding([moments(model)])
    with caplog.at_level(logging.WARNING, "flowstone"), waiting(tmp_path) as checkpointer:
        for step in (1, 2):
            expected = plain(model)
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            backward(model)
            optimizer.step()
            assert failure(save) is None
            checkpoint = fs.open(tmp_path, step=step)
            assert all(torch.equal(checkpoint.read(f"model.{name}"), tensor) for name, tensor in expected.items())
    reported = [record.getMessage() for record in caplog.records if "on the step of 'optimizer'" in record.getMessage()]
    assert len(reported) == 1
    assert "save returns only once the tensors that this optimizer changes are captured" in reported[0]


class Average(torch.optim.SGD):
    """Has other weights for evaluations, as optimizers that are schedule-free do; and a name of its own for that."""

    @torch.no_grad()
    def train(self) -> None:
        self._by(1.01)

    @torch.no_grad()
    def eval(self) -> None:
        self._by(0.99)

    @torch.no_grad()
    def swap_in_averages(self) -> None:
        self._by(0.98)

    def _by(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(factor)


@pytest.mark.parametrize("verb", ["train", "eval", "swap_in_averages"])
@pytest.mark.parametrize("how", ["bare", "wrapped"])
def test_what_an_optimizer_changes_by_other_methods_waits_like_its_step(tmp_path: Path, verb: str, how: str) -> None:
    model = network()
    inside = Average(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = inside if how == "bare" else Accelerated(inside)
    with waiting(tmp_path) as checkpointer:
        for step in (1, 2):
            expected = plain(model)
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            assert not save.captured.done()
            getattr(inside, verb)()
            assert failure(save) is None
            checkpoint = fs.open(tmp_path, step=step)
            assert all(torch.equal(checkpoint.read(f"model.{name}"), tensor) for name, tensor in expected.items())
    assert verb not in vars(inside), "closing takes the hooks away"


def test_an_optimizer_that_waits_is_copied_and_pickled_without_the_wait(tmp_path: Path) -> None:
    model = network()
    optimizer = Average(model.parameters(), lr=0.1)
    other = network()
    held = Scheduled(torch.optim.SGD(other.parameters(), lr=0.1))
    with waiting(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"model": model, "optimizer": optimizer, "other": other, "held": held})
        copies = [copy.deepcopy(item) for item in (optimizer, held)]
        copies += [pickle.loads(pickle.dumps(item)) for item in (optimizer, held)]
        for clone in copies:
            assert "FencedMethod" not in repr(vars(clone))
            clone.step()  # without a wait
        assert not save.captured.done()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
        backward(model)
        optimizer.step()
        assert save.captured.done()
        scheduler.step()
        assert failure(save) is None


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization (davda54's SAM): two steps, of which the second is another optimizer's."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sharpened(seed: int) -> tuple[nn.Sequential, Sharp]:
    torch.manual_seed(seed)
    model = network()
    return model, Sharp(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def sharp_step(model: nn.Module, optimizer: Sharp, seed: int) -> None:
    for part in (optimizer.first_step, optimizer.second_step):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        backward(model)
        part()


def test_the_state_of_an_optimizer_that_another_hides_is_saved_and_both_steps_wait(tmp_path: Path) -> None:
    """Its state_dict() has nothing of the base's momentum: a resume by that alone goes another way, without a word."""
    model, optimizer = sharpened(0)
    other, into = sharpened(1)
    with waiting(tmp_path) as checkpointer:
        for step in (1, 2):
            sharp_step(model, optimizer, step)
            save = checkpointer.save(step, {"model": model, "optimizer": optimizer})
        checkpointer.load({"model": other, "optimizer": into})
        assert failure(save) is None
        assert into.base_optimizer.param_groups is into.param_groups
        for net, stepped in ((model, optimizer), (other, into)):
            sharp_step(net, stepped, 3)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        save = checkpointer.save(3, {"model": model, "optimizer": optimizer})
        sharp_step(model, optimizer, 4)
        assert failure(save) is None
    assert "optimizer.base.state.model.0.weight.momentum_buffer" in fs.open(tmp_path).tensors


def test_a_load_into_a_state_dict_that_hides_an_optimizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model, optimizer = sharpened(0)
    sharp_step(model, optimizer, 1)
    with waiting(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).committed.result()
        other, into = sharpened(1)
        state = {"model": other.state_dict(), "optimizer": into.state_dict()}
        weight = other[0].weight.detach().clone()
        with pytest.raises(fs.MismatchError, match=r"optimizer\.base\.state\.model\.0\.weight") as caught:
            checkpointer.load_state_dict(state)
    assert "give load() the kind of object that was saved as state['optimizer']" in str(caught.value.facts["next"])
    assert torch.equal(other[0].weight, weight)


def test_names_do_not_tell_of_fabrics_modules(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        """As Fabric's: its state_dict() is that of the module, its parameters have longer names."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._forward_module = module

        def state_dict(self, *args: Any, **named: Any) -> Any:
            return self._forward_module.state_dict(*args, **named)

        def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
            return self._forward_module.load_state_dict(state_dict, *args, **named)

    model, optimizer = trained(moments)
    other, into = trained(moments, seed=1)
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": Wrapped(model), "optimizer": optimizer}).committed.result()
        checkpointer.load({"model": other, "optimizer": into})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
