"""Recipes of training: averages, adapters, masks, norms, schedules, frozen layers, other optimizers."""

from __future__ import annotations

import copy
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from hostile.moves.move import Detection, Table
from hostile.moves.surgery import is_parametrized
from hostile.states import OPTIMIZERS, WIDTH, Accelerated, ScheduleFree, optimize

if TYPE_CHECKING:
    from hostile.trainer import Trainer

TABLE = Table()


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 100, bias=False)
        self.up = nn.Linear(100, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def _plain_layers(trainer: Trainer) -> list[int]:
    """Positions of unmodified layers."""
    body = trainer.job.model.body
    plain = [index for index, layer in enumerate(body) if type(layer) is nn.Linear and not is_parametrized(layer)]
    return [index for index in plain if body[index].weight.dtype == torch.float32]


def _with(trainer: Trainer, kind: type | str) -> list[int]:
    """Positions of layers of a type, or with this attribute."""
    body = enumerate(trainer.job.model.body)
    return [n for n, layer in body if (hasattr(layer, kind) if isinstance(kind, str) else isinstance(layer, kind))]


# Averages


@TABLE.quiet(weight=2, needs="average")
def update_average(trainer: Trainer, chance: Random) -> bool | None:
    """The moving average is updated with the weights, whether or not there was a step."""
    if trainer.job.average is None:
        return False
    trainer.escapes("update-average", lambda value: value.fence == "manual")
    trainer.job.average.update_parameters(trainer.job.model)
    return None


@TABLE.quiet(needs="average")
def step_and_average(trainer: Trainer, chance: Random) -> bool | None:
    """A step, and the average after it."""
    if trainer.job.average is None:
        return False
    trainer.train()
    trainer.job.average.update_parameters(trainer.job.model)
    return None


@TABLE.escapes(Detection.SAMPLES, needs="average")
def evaluate_the_average(trainer: Trainer, chance: Random) -> bool | None:
    """Copies the averaged weights into the model for an evaluation, and then the model's own back."""
    if trainer.job.average is None:
        return False
    model = trainer.job.model
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(trainer.job.average.module.state_dict())
    with torch.no_grad():
        model(trainer.job.batch())
    model.load_state_dict(kept)
    return None


@TABLE.quiet(weight=3, needs="average")
def swap_in_the_average(trainer: Trainer, chance: Random) -> bool | None:
    """Points the weights at the averaged ones for an evaluation, and back."""
    if trainer.job.average is None:
        return False
    own = list(trainer.job.model.parameters())
    kept = [p.data for p in own]
    for parameter, average in zip(own, trainer.job.average.parameters(), strict=True):
        parameter.data = average.data
    with torch.no_grad():
        trainer.job.model(trainer.job.batch())
    for parameter, data in zip(own, kept, strict=True):
        parameter.data = data
    return None


# Adapters, masks, norms


@TABLE.quiet()
def add_an_adapter(trainer: Trainer, chance: Random) -> bool | None:
    """Adds a low-rank adapter to a layer, freezes the layer, and trains the adapter."""
    result = _plain_layers(trainer)
    if not result:
        return False
    position = chance.choice(result)
    adapted = Adapted(trainer.job.model.body[position])
    adapted.base.requires_grad_(False)
    trainer.job.model.body[position] = adapted
    trainer.job.optimizers[0].add_param_group({"params": [adapted.down.weight, adapted.up.weight]})
    trainer.restructured()
    return None


@TABLE.escapes(Detection.SAMPLES)
def merge_an_adapter(trainer: Trainer, chance: Random) -> bool | None:
    """Adds an adapter's product to its layer's weight, in place, and removes the adapter."""
    body = trainer.job.model.body
    if not _with(trainer, Adapted) and add_an_adapter(trainer, chance) is False:
        return False
    position = chance.choice(_with(trainer, Adapted))
    adapted = body[position]
    with torch.no_grad():
        adapted.base.weight += adapted.up.weight @ adapted.down.weight + 1e-3
    body[position] = adapted.base.requires_grad_(True)
    optimize(trainer.job)
    trainer.restructured()
    return None


@TABLE.quiet()
def prune_a_layer(trainer: Trainer, chance: Random) -> bool | None:
    """Masks a third of a layer's weights: the weight is renamed, and computed again in every forward."""
    layers = [layer for layer in _plain_layers(trainer) if trainer.job.model.body[layer].weight.is_contiguous()]
    if not layers:
        return False
    with torch.no_grad():
        prune.l1_unstructured(trainer.job.model.body[chance.choice(layers)], "weight", 0.3)
    trainer.restructured()
    return None


@TABLE.quiet()
def prune_for_good(trainer: Trainer, chance: Random) -> bool | None:
    """Makes a mask permanent: the masked weight replaces the original."""
    if not _with(trainer, "weight_orig") and prune_a_layer(trainer, chance) is False:
        return False
    with torch.no_grad():
        prune.remove(trainer.job.model.body[chance.choice(_with(trainer, "weight_orig"))], "weight")
    trainer.restructured()
    return None


@TABLE.escapes(Detection.COUNTER)
def norm_a_weight(trainer: Trainer, chance: Random) -> bool | None:
    """Parametrizes a layer's weight by magnitude and direction, and creates the optimizer again."""
    result = _plain_layers(trainer)
    if not result:
        return False
    parametrizations.weight_norm(trainer.job.model.body[chance.choice(result)])
    optimize(trainer.job)
    trainer.restructured()
    return None


@TABLE.escapes(Detection.COUNTER)
def end_a_norm(trainer: Trainer, chance: Random) -> bool | None:
    """Removes a parametrization."""
    if not _with(trainer, "parametrizations") and norm_a_weight(trainer, chance) is False:
        return False
    layer = trainer.job.model.body[chance.choice(_with(trainer, "parametrizations"))]
    parametrize.remove_parametrizations(layer, "weight")
    optimize(trainer.job)
    trainer.restructured()
    return None


@TABLE.escapes(Detection.COUNTER)
def renormalise_rows(trainer: Trainer, chance: Random) -> None:
    """A forward through an embedding with max_norm, which renormalises the rows that it looks up, in place."""
    embedding = trainer.job.model.embedding
    kept = embedding.max_norm
    embedding.max_norm = chance.choice([0.5, 3.0])
    with torch.no_grad():
        trainer.job.model(trainer.job.batch())
    embedding.max_norm = kept


@TABLE.quiet()
def tie_and_untie(trainer: Trainer, chance: Random) -> None:
    """The head shares the embedding's weight, or gets one of its own again."""
    model = trainer.job.model
    tied = model.head.weight is model.embedding.weight
    model.head.weight = nn.Parameter(model.head.weight.detach().clone()) if tied else model.embedding.weight
    optimize(trainer.job)
    trainer.restructured()


@TABLE.quiet()
def change_a_type(trainer: Trainer, chance: Random) -> bool | None:
    """A layer is converted to bfloat16, or back, so its parameters get other memory."""
    body = [layer for layer in trainer.job.model.body if type(layer) is nn.Linear and not is_parametrized(layer)]
    if not body:
        return False
    layer = chance.choice(body)
    layer.to(torch.bfloat16 if layer.weight.dtype == torch.float32 else torch.float32)
    for optimizer in trainer.job.optimizers:
        for parameter in layer.parameters():
            optimizer.state.pop(parameter, None)
            parameter.grad = None
    trainer.restructured()
    return None


# What is trained, and by which optimizer


@TABLE.quiet()
def freeze_or_thaw(trainer: Trainer, chance: Random) -> None:
    """Trained layers are frozen, and frozen ones trained; the optimizer keeps them."""
    for layer in chance.sample(list(trainer.job.model.body), 1):
        for parameter in layer.parameters():
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


@TABLE.quiet()
def freeze_for_good(trainer: Trainer, chance: Random) -> None:
    """A layer is frozen, and the optimizer is created again without it."""
    for parameter in chance.choice(list(trainer.job.model.body)).parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    optimize(trainer.job)


@TABLE.quiet()
def add_a_layer(trainer: Trainer, chance: Random) -> bool | None:
    """The model grows by a layer, which joins the optimizer as a group of its own."""
    if len(trainer.job.model.body) > 5:
        return False
    layer = nn.Linear(WIDTH, WIDTH)
    trainer.job.model.body.append(layer)
    trainer.job.optimizers[0].add_param_group({"params": list(layer.parameters())})
    trainer.restructured()
    return None


@TABLE.quiet()
def delete_a_layer(trainer: Trainer, chance: Random) -> bool | None:
    """The model loses a layer, and all its state is removed."""
    if len(trainer.job.model.body) < 3:
        return False
    del trainer.job.model.body[chance.randrange(len(trainer.job.model.body))]
    optimize(trainer.job)
    trainer.restructured()
    return None


@TABLE.quiet()
def another_optimizer(trainer: Trainer, chance: Random) -> None:
    """Another optimizer replaces the first."""
    others = sorted(OPTIMIZERS.keys() - {trainer.job.kind})
    trainer.job.kind = chance.choice(others)
    optimize(trainer.job)


@TABLE.quiet()
def forget_the_slots(trainer: Trainer, chance: Random) -> None:
    """The optimizer's state is cleared."""
    for optimizer in trainer.job.optimizers:
        optimizer.state.clear()


@TABLE.quiet()
def wrap_the_optimizer(trainer: Trainer, chance: Random) -> bool | None:
    """The optimizer is put into a wrapper that supports no hooks, or removed from it."""
    for section, value in list(trainer.job.state.items()):
        if isinstance(value, Accelerated):
            trainer.job.state[section] = value.optimizer
        elif isinstance(value, torch.optim.Optimizer):
            trainer.job.state[section] = Accelerated(value)
    return None


@TABLE.quiet(weight=3, needs="schedule-free")
def evaluate_schedule_free(trainer: Trainer, chance: Random) -> bool | None:
    """A schedule-free optimizer swaps weights in place for an evaluation, and back for training."""
    optimizers = [optimizer for optimizer in trainer.job.optimizers if isinstance(optimizer, ScheduleFree)]
    known = {id(optimizer) for optimizer in optimizers}
    trainer.escapes("eval", lambda value: value.fence == "manual" or known.isdisjoint(map(id, value.optimizers)))
    for optimizer in optimizers:
        optimizer.eval()
    with torch.no_grad():
        trainer.job.model(trainer.job.batch())
    for optimizer in optimizers:
        optimizer.train()
    return None if optimizers else False


@TABLE.quiet()
def checkpoint_gradients(trainer: Trainer, chance: Random) -> None:
    """Activation checkpointing is switched on or off."""
    trainer.job.model.recompute = not trainer.job.model.recompute


@TABLE.quiet()
def accumulate(trainer: Trainer, chance: Random) -> None:
    """Some backward passes without a step."""
    for _ in range(chance.randint(1, 3)):
        trainer.job.backward()


@TABLE.quiet()
def clip_gradients(trainer: Trainer, chance: Random) -> None:
    """A backward pass, and gradients are clipped in place."""
    trainer.job.backward()
    nn.utils.clip_grad_norm_(trainer.job.model.parameters(), 0.1)


@TABLE.quiet()
def step_the_scheduler(trainer: Trainer, chance: Random) -> bool | None:
    """The learning rate changes."""
    for optimizer in trainer.job.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return None
