"""FSDP1 of every kind: a checkpoint of any ranks equals that of a plain module, and any ranks load it."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from across import FIRST, Make, derive, number, rank_of, restored, same_tensors, saved, step
from reference import fill, save, stored
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flowstone as fs
from flowstone.state import StateDescription, describe, prepare

LAYERS = ModuleWrapPolicy({nn.Linear})
Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """Parameters of many shapes: one element, none, tied, laid out otherwise than row-major; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.empty(5, 7).t())
        self.first = nn.Linear(5, 9)
        self.block = nn.Sequential(nn.Linear(9, 3), nn.Linear(3, 9, bias=False))
        self.last = nn.Linear(5, 9, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out


class Untied(nn.Module):
    """As deep as wrapping can be told apart; a tied pair must not be wrapped apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.block = nn.Sequential(nn.Linear(9, 3), nn.Linear(3, 9, bias=False))
        self.own = nn.Parameter(torch.empty(2, 3, 2))


class Frozen(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


def plain(module: nn.Module) -> nn.Module:
    return module


def whole(module: nn.Module, *, orig: bool, **options: object) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one rank needs no sharding
        return FSDP(module, device_id=torch.device("cpu"), use_orig_params=orig, **options)


def layers(module: nn.Module, *, orig: bool, **options: object) -> nn.Module:
    return whole(module, orig=orig, auto_wrap_policy=LAYERS, **options)


def inner(module: Untied, *, orig: bool) -> nn.Module:
    """A module that is no FullyShardedDataParallel itself, around one."""
    module.block = whole(module.block, orig=orig)  # type: ignore[assignment]
    return module


def checkpointed(module: Untied, *, orig: bool) -> nn.Module:
    """Activations are computed again: by a wrapper inside of one unit, and around what is another."""
    module.first = checkpoint_wrapper(module.first)  # type: ignore[assignment]
    module.block = whole(checkpoint_wrapper(module.block), orig=orig)  # type: ignore[assignment]
    return whole(module, orig=orig)


def hybrid(module: nn.Module, *, orig: bool) -> nn.Module:
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2) if size % 2 == 0 else (1, size), mesh_dim_names=("copies", "shards"))
    return whole(module, orig=orig, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def state_of(net: type[nn.Module], wrap: Wrap, offset: int) -> dict[str, object]:
    module = net()
    number(module, offset)
    model = wrap(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    step(optimizer, without=absent(model))
    derive(optimizer, offset)
    return {"model": model, "optimizer": optimizer}


def absent(model: nn.Module) -> set[int]:
    """Identities of original parameters that get no gradient, as nothing of them is here."""
    flats = [module._handle.flat_param for module in FSDP.fsdp_modules(model) if module._handle is not None]
    return {
        id(param) for flat in flats if flat._params is not None
        for param, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True)
        if not info.in_shard and math.prod(shape)
    }


def elements(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    slots = [slot for of in optimizer.state.values() for name, slot in of.items() if name != "step"]
    return [*(p.data for p in model.parameters()), *model.buffers(), *slots]


SHARD = {strategy.name: partial(whole, sharding_strategy=strategy) for strategy in (
    ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)}
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
WRAPS: dict[str, tuple[type[nn.Module], Callable[..., nn.Module]]] = {
    **{name: (Net, wrap) for name, wrap in SHARD.items()},
    "HYBRID_SHARD": (Net, hybrid),
    "mixed precision": (Net, partial(whole, mixed_precision=MIXED)),
    "each layer": (Untied, layers),
    "inside a plain module": (Untied, inner),
    "frozen layers": (Frozen, layers),
    "activation checkpoints": (Untied, checkpointed),
}


@pytest.mark.parametrize("orig", [True, False], ids=["original parameters", "flat parameters"])
@pytest.mark.parametrize("how", WRAPS)
def test_any_ranks_save_what_a_plain_module_would_and_any_load_it(how: str, orig: bool) -> None:
    net, wrap = WRAPS[how]
    sharded = partial(state_of, net, partial(wrap, orig=orig))
    alone = partial(state_of, net, plain)
    reference = saved(alone, 1)
    for size in (1, 2, 3, 4):
        checkpoint = saved(sharded, size)
        same_tensors(checkpoint, reference)
        assert checkpoint.objects == reference.objects
        restored(checkpoint, alone, 1, elements)
    for source, size in itertools.product((1, 3), (1, 2, 3, 4)):
        restored(saved(sharded, source), sharded, size, elements)
    restored(reference, sharded, 3, elements)


def test_flat_and_original_parameters_load_each_other() -> None:
    flat, orig = (partial(state_of, Untied, partial(layers, orig=orig)) for orig in (False, True))
    for source, target in ((flat, orig), (orig, flat)):
        restored(saved(source, 3), target, 2, elements)


def test_what_fsdp_is_told_to_ignore_is_whole_on_every_rank() -> None:
    def wrap(module: nn.Module, *, orig: bool) -> nn.Module:
        return whole(module, orig=orig, ignored_modules=[module.first])

    alone = partial(state_of, Untied, plain)
    for orig in (True, False):
        sharded = partial(state_of, Untied, partial(wrap, orig=orig))
        checkpoint = saved(sharded, 3)
        same_tensors(checkpoint, saved(alone, 1))
        restored(checkpoint, alone, 1, elements)
        restored(saved(alone, 1), sharded, 2, elements)


def test_slots_that_are_not_there_yet_are_made_where_the_parameter_lies() -> None:
    for orig in (True, False):
        make = partial(state_of, Net, partial(whole, orig=orig))
        checkpoint = saved(make, 3)

        def bare(offset: int, make: Make = make) -> dict[str, object]:
            state = make(offset)
            if offset:
                state["optimizer"].state.clear()  # type: ignore[attr-defined]
            return state

        for rank in range(2):
            with rank_of(rank, 2):
                right, state = make(0), bare(500_000)
                restoration = prepare(state, stored(checkpoint), rank=rank)
                assert restoration.differences == ()
                fill(checkpoint, restoration)
                restoration.finish()
                mine, theirs = right["optimizer"].state, state["optimizer"].state  # type: ignore[attr-defined]
                assert len(mine) == len(theirs) > 0
                for element, other in zip(elements(right), elements(state), strict=True):
                    assert element.shape == other.shape
                    assert torch.equal(element[element >= 1000], other[element >= 1000])


def lazy(described: StateDescription) -> None:
    flags = dict(zip(described.pieces.names, described.lazy, strict=True))
    assert all(of for name, of in flags.items() if name != "model.count")
    assert not flags["model.count"]


def test_parameters_and_slots_are_captured_lazily_and_without_a_copy() -> None:
    for orig in (True, False):
        saved(partial(state_of, Net, partial(whole, orig=orig)), 2, lazy)
        with rank_of(1, 2):
            state = state_of(Net, partial(whole, orig=orig), 0)
            described = describe(state)
            flat = state["model"]._handle.flat_param  # type: ignore[attr-defined]
            first = flat.data_ptr()
            for index, piece in enumerate(described.pieces):
                if piece.name.startswith("model.") and piece.name != "model.count" and piece.box.elements:
                    assert first <= described.places.memory(index, piece).address < first + 4 * flat.numel()


def test_a_parameter_of_which_nothing_is_here_is_not_missing() -> None:
    reference = stored(saved(partial(state_of, Untied, plain), 1))
    with rank_of(2, 3):
        state = state_of(Untied, partial(whole, orig=True), 0)
        model, optimizer = state["model"], state["optimizer"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        empty = {key for key, param in model.named_parameters() if not param.numel()}  # type: ignore[attr-defined]
        assert empty, "rank 2 holds none of the first ones"
        step(optimizer)  # and yet the optimizer has state of them
        names = set(describe(state).pieces.names)
        for key in empty:
            assert not any(key.removeprefix("_fsdp_wrapped_module.") in name for name in names)
        before = {id(key): dict(slots) for key, slots in optimizer.state.items() if not key.numel()}
        prepare(state, reference, rank=2).finish()
        assert {id(key): dict(slots) for key, slots in optimizer.state.items() if not key.numel()} == before != {}


def test_steps_of_one_flat_parameter_have_to_agree() -> None:
    reference = saved(partial(state_of, Untied, plain), 1)
    name = "optimizer.state.model.block.0.weight.step"
    reference.tensors[name] = reference.tensors[name].copy()
    with rank_of(0, 2):
        state = state_of(Untied, partial(whole, orig=False), 0)
        restoration = prepare(state, stored(reference), rank=0)
        targets = {alias.name: alias.target for alias in restoration.aliases}
        assert targets[name].endswith(".step"), "the loader compares what is tied, and refuses what differs"


def test_the_group_of_a_flat_parameter_is_that_of_all_that_lie_in_it() -> None:
    reference = saved(partial(state_of, Untied, plain), 1)

    def two_groups(offset: int) -> dict[str, object]:
        state = state_of(Untied, plain, offset)
        first, *rest = state["model"].parameters()  # type: ignore[attr-defined]
        state["optimizer"] = torch.optim.Adam([{"params": [first]}, {"params": rest, "lr": 0.5}], lr=0.0)
        return state

    with rank_of(1, 2):
        state = state_of(Untied, partial(whole, orig=False), 0)
        assert not prepare(state, stored(reference), rank=1).differences
        differences = prepare(state, stored(save(two_groups(0))), rank=1).differences
        assert [difference.kind for difference in differences] == ["unexpected", "unexpected", "missing"]


def test_groups_of_whole_flat_parameters_are_those_of_what_lies_in_them() -> None:
    def grouped(offset: int, wrap: Wrap) -> dict[str, object]:
        state = state_of(Untied, wrap, offset)
        model = state["model"]
        assert isinstance(model, nn.Module)
        inner = [parameter for key, parameter in model.named_parameters() if "block" in key]
        outer = [parameter for key, parameter in model.named_parameters() if "block" not in key]
        optimizer = torch.optim.Adam([{"params": inner}, {"params": outer, "lr": 0.5}], lr=0.0)
        optimizer.state.update(state["optimizer"].state)  # type: ignore[attr-defined]
        return {"model": model, "optimizer": optimizer}

    alone = partial(grouped, wrap=plain)
    for orig in (True, False):
        sharded = partial(grouped, wrap=partial(inner, orig=orig))
        assert saved(sharded, 2).objects == saved(alone, 1).objects
        restored(saved(alone, 1), sharded, 3, elements)
        restored(saved(sharded, 3), alone, 1, elements)


def test_an_original_parameter_that_lies_elsewhere_now_is_refused() -> None:
    with rank_of(0, 2):
        state = state_of(Untied, partial(whole, orig=True), 0)
        model = state["model"]
        assert isinstance(model, FSDP)
        model.own.data = model.own.data.clone()
        with pytest.raises(fs.UnsupportedStateError, match=r"'model\.own' is no longer in its flat"):
            describe(state)


def test_buffers_that_mixed_precision_has_cast_are_saved_in_their_own_dtype() -> None:
    with rank_of(0, 2):
        state = state_of(Net, partial(whole, orig=True, mixed_precision=MIXED), 0)
        model = state["model"]
        assert isinstance(model, FSDP)
        model.count.data = model.count.data.bfloat16()  # as the first forward does
        checkpoint = save({"model": model})
        assert checkpoint.dtypes["model.count"] == "float32"
        checkpoint.tensors["model.count"] = torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8).view(3, 4).numpy()
        restoration = prepare({"model": model}, stored(checkpoint))
        fill(checkpoint, restoration)
        restoration.finish()
        assert model.count.dtype == torch.bfloat16
        assert model.count.tolist() == [1.0, 2.0, 3.0]


def test_extra_state_of_modules_is_saved_and_loaded_without_the_hooks_that_gather() -> None:
    class Extra(nn.Linear):
        said = "nothing"

        def get_extra_state(self) -> object:
            return {"said": self.said}

        def set_extra_state(self, state: object) -> None:
            self.said = state["said"]  # type: ignore[index]

    with rank_of(0, 2):
        model = whole(nn.Sequential(Extra(2, 3)), orig=True)
        model.module[0].said = "before"  # type: ignore[index]
        hooks = [dict(vars(model)[table]) for table in ("_state_dict_hooks", "_load_state_dict_pre_hooks")]
        with mock.patch.object(FSDP, "forward", side_effect=AssertionError):
            checkpoint = save({"model": model})
            model.module[0].said = "after"  # type: ignore[index]
            restoration = prepare({"model": model}, stored(checkpoint))
            assert restoration.differences == ()
            fill(checkpoint, restoration)
            restoration.finish()
        assert model.module[0].said == "before"  # type: ignore[index]
        assert hooks == [dict(vars(model)[table]) for table in ("_state_dict_hooks", "_load_state_dict_pre_hooks")]


def test_inside_of_summon_full_params_it_is_refused() -> None:
    with rank_of(0, 2):
        state = state_of(Untied, partial(whole, orig=True), 0)
        with (
            FSDP.summon_full_params(state["model"]),  # type: ignore[arg-type]
            pytest.raises(fs.UnsupportedStateError, match="summon_full_params"),
        ):
            describe(state)


def test_a_torch_that_is_built_otherwise_is_named() -> None:
    with rank_of(0, 2):
        state = state_of(Untied, partial(whole, orig=True), 0)
        del state["model"]._handle.flat_param._fqns  # type: ignore[attr-defined]
        with pytest.raises(fs.UnsupportedStateError, match=re.escape(f"torch {torch.__version__}")) as caught:
            describe(state)
        assert "_fqns" in str(caught.value)


def test_what_is_not_dense_is_refused() -> None:
    with rank_of(0, 2):
        model = whole(nn.Sequential(nn.Linear(2, 2)), orig=True)
        model._handle.flat_param._strides = ((6, 2), (1,))  # type: ignore[union-attr]
        with pytest.raises(fs.UnsupportedStateError, match="not a dense tensor"):
            describe({"model": model})


def test_slots_of_other_shapes_are_refused_where_only_a_part_of_the_parameter_is() -> None:
    for orig in (True, False):
        with rank_of(0, 2):
            state = state_of(Untied, partial(whole, orig=orig), 0)
            optimizer = state["optimizer"]
            assert isinstance(optimizer, torch.optim.Optimizer)
            slots = next(of for key, of in optimizer.state.items() if key.numel())
            slots["rows"] = torch.zeros(3)
            with pytest.raises(fs.UnsupportedStateError, match=r"\.rows' does not match this rank's shard"):
                describe(state)
            slots["rows"] = [torch.zeros(3)]
            with pytest.raises(fs.UnsupportedStateError, match=r"\.rows' does not match this rank's shard"):
                describe(state)


def test_what_every_rank_keeps_for_itself_has_no_flat_parameters() -> None:
    with rank_of(0, 2):
        model = whole(Untied(), orig=True)
        with pytest.raises(fs.UnsupportedStateError, match="remove PerRank"):
            describe({"model": fs.PerRank(model)})


@pytest.mark.parametrize("orig", [True, False])
def test_one_model_in_two_places_is_whole_in_both(orig: bool) -> None:
    def make(offset: int) -> dict[str, object]:
        model = state_of(Untied, partial(whole, orig=orig), offset)["model"]
        return {"model": model, "again": model, "optimizer": torch.optim.Adam(model.parameters())}  # type: ignore[attr-defined]

    checkpoint = saved(make, 3)
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("model."):
            assert checkpoint.tensors["again" + name.removeprefix("model")].tobytes() == tensor.tobytes()
            assert tensor.view("float32").min() >= FIRST
    restored(checkpoint, make, 2, elements)


def test_a_wrapped_module_in_two_places_of_a_model_is_tied() -> None:
    def make(offset: int) -> dict[str, object]:
        module = Untied()
        number(module, offset)
        module.block = whole(module.block, orig=True)  # type: ignore[assignment]
        module.again = module.block
        return {"model": module}

    checkpoint = saved(make, 2)
    assert checkpoint.tied["model.again.0.weight"] == "model.block.0.weight"
