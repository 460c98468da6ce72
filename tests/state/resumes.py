"""Training runs of every optimizer and scheduler, and the flows by which they resume; `python -m resumes` runs all.

A resumed flow is compared with a resume by torch.save, bit for bit, after further steps.
"""

from __future__ import annotations

import copy
import io
import itertools
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from wrapped_optimizers import SAM, Clipping, Lookahead, ScheduleFree, Several

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneStager, FlowstoneWriter
from flowstone.adapters.dcp.target import target_of
from flowstone.adapters.lightning.reading import read
from flowstone.adapters.lightning.saves import LightningSaves
from flowstone.adapters.lightning.values import validated

BEFORE, BETWEEN, AFTER = 3, 2, 3
"""Steps before the save; those that a rollback forgets; those after the resume."""

Make = Callable[[torch.nn.Module], Any]


def _of(kind: str, **options: Any) -> Make:
    return lambda model: getattr(optim, kind)(model.parameters(), **{"lr": 0.01, **options})


def _tensor_lr(kind: str) -> Make:
    return lambda model: getattr(optim, kind)(model.parameters(), lr=torch.tensor(0.01), foreach=False)


def _matrices(model: torch.nn.Module) -> Any:
    return optim.Muon([parameter for parameter in model.parameters() if parameter.dim() == 2], lr=0.01)


def _grouped(model: torch.nn.Module) -> Any:
    of = dict(model.named_parameters())
    optimizer = optim.AdamW([of["a.weight"], of["a.bias"]], lr=0.01)
    optimizer.add_param_group({"params": [of["b.bias"]], "weight_decay": 0.0})
    optimizer.add_param_group({"params": [of["b.weight"]], "lr": 0.02, "betas": (0.8, 0.9)})
    return optimizer


def _named(model: torch.nn.Module) -> Any:
    return optim.AdamW(list(model.named_parameters())[::-1], lr=0.01)


OPTIMIZERS: Mapping[str, Make] = {
    "SGD": _of("SGD"), "SGD momentum": _of("SGD", momentum=0.9),
    "SGD dampening": _of("SGD", momentum=0.9, dampening=0.1),
    "SGD nesterov": _of("SGD", momentum=0.9, nesterov=True), "SGD maximize": _of("SGD", momentum=0.5, maximize=True),
    "SGD foreach": _of("SGD", momentum=0.9, foreach=True), "SGD fused": _of("SGD", momentum=0.9, fused=True),
    "SGD decay": _of("SGD", weight_decay=0.1), "SGD tensor lr": _tensor_lr("SGD"),
    "Adam": _of("Adam"), "Adam amsgrad": _of("Adam", amsgrad=True), "Adam maximize": _of("Adam", maximize=True),
    "Adam foreach": _of("Adam", foreach=True), "Adam fused": _of("Adam", fused=True),
    "Adam tensor lr": _tensor_lr("Adam"),
    "Adam fused amsgrad": _of("Adam", fused=True, amsgrad=True), "Adam decay": _of("Adam", weight_decay=0.1),
    "Adam decoupled": _of("Adam", weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW": _of("AdamW"), "AdamW amsgrad": _of("AdamW", amsgrad=True), "AdamW foreach": _of("AdamW", foreach=True),
    "AdamW fused": _of("AdamW", fused=True), "AdamW tensor lr": _tensor_lr("AdamW"), "AdamW groups": _grouped,
    "AdamW names": _named, "AdamW maximize": _of("AdamW", maximize=True),
    "Adamax": _of("Adamax"), "Adamax foreach": _of("Adamax", foreach=True), "NAdam": _of("NAdam"),
    "NAdam decoupled": _of("NAdam", weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam foreach": _of("NAdam", foreach=True), "RAdam": _of("RAdam"), "RAdam foreach": _of("RAdam", foreach=True),
    "RAdam decoupled": _of("RAdam", weight_decay=0.1, decoupled_weight_decay=True),
    "Adagrad": _of("Adagrad"), "Adagrad start": _of("Adagrad", initial_accumulator_value=0.3, lr_decay=0.1),
    "Adagrad fused": _of("Adagrad", fused=True), "Adagrad foreach": _of("Adagrad", foreach=True),
    "Adadelta": _of("Adadelta"), "Adadelta foreach": _of("Adadelta", foreach=True), "RMSprop": _of("RMSprop"),
    "RMSprop centered": _of("RMSprop", centered=True), "RMSprop momentum": _of("RMSprop", momentum=0.9),
    "RMSprop both": _of("RMSprop", momentum=0.9, centered=True), "RMSprop foreach": _of("RMSprop", foreach=True),
    "Rprop": _of("Rprop"), "Rprop foreach": _of("Rprop", foreach=True), "ASGD": _of("ASGD"),
    "ASGD t0": _of("ASGD", t0=2),
    "ASGD foreach": _of("ASGD", foreach=True), "Adafactor": _of("Adafactor"), "LBFGS": _of("LBFGS", max_iter=3),
    "LBFGS wolfe": _of("LBFGS", max_iter=3, line_search_fn="strong_wolfe"), "Muon": _matrices,
    "SAM": lambda model: SAM(model.parameters(), optim.SGD, lr=0.01, momentum=0.9),
    "SAM Adam": lambda model: SAM(model.parameters(), optim.Adam, lr=0.01),
    "ScheduleFree": lambda model: ScheduleFree(model.parameters(), lr=0.01),
    "Lookahead": lambda model: Lookahead(optim.AdamW(model.parameters(), lr=0.01)),
    "Clipping": lambda model: Clipping(optim.Adam(model.parameters(), lr=0.01), 0.1),
    "Several": lambda model: Several(
        optim.AdamW([parameter for parameter in model.parameters() if parameter.dim() == 2], lr=0.01),
        optim.SGD([parameter for parameter in model.parameters() if parameter.dim() < 2], lr=0.01, momentum=0.9),
    ),
}


class Decay:
    """A callable with state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return float(0.9**self.calls)


def _sequential(o: Any) -> Any:
    return lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    )


def _chained(o: Any) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o)


SCHEDULERS: Mapping[str, Callable[[Any], Any]] = {
    "none": lambda o: None, "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR object": lambda o: lr_scheduler.LambdaLR(o, [Decay() for _ in o.param_groups]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2), "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lr_scheduler.ConstantLR, "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9), "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05), "SequentialLR": _sequential, "ChainedScheduler": _chained,
}


class Setting(NamedTuple):
    """What else belongs to a run: layers without gradients at first, frozen ones, an average, a scaler."""

    late: bool = False
    frozen: bool = False
    averaged: str = ""
    scaled: bool = False


SETTINGS: Mapping[str, Setting] = {
    "plain": Setting(), "late": Setting(late=True), "frozen": Setting(frozen=True), "ema": Setting(averaged="ema"),
    "swa": Setting(averaged="swa"), "scaler": Setting(scaled=True),
}


def _scheduled(optimizer: Any) -> Any:
    """What a scheduler takes: of a wrapper that is no optimizer, the first one inside."""
    if isinstance(optimizer, optim.Optimizer):
        return optimizer
    return optimizer.optimizers[0] if isinstance(optimizer, Several) else optimizer.optimizer


class Run:
    """One training run: its objects by section, and how a step of it goes."""

    def __init__(self, optimizer: str, scheduler: str, setting: Setting, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.setting, self.steps = setting, 0
        self.model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = SCHEDULERS[scheduler](_scheduled(self.optimizer))
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            self.objects["scheduler"] = self.scheduler
        if setting.averaged:
            given = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if setting.averaged == "ema" else {}
            self.objects["average"] = AveragedModel(self.model, **given)
        if setting.scaled:
            self.objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def _loss(self) -> torch.Tensor:
        x = torch.linspace(-1, 1, 8).reshape(2, 4) * (1 + self.steps)
        y = self.model["a"](x)
        if not (self.setting.late and self.steps < BEFORE):
            y = y + self.model["b"](x)
        return y.square().mean()

    def step(self) -> None:
        if self.setting.frozen:
            self.model["b"].requires_grad_(self.steps >= BEFORE)
        scaler = self.objects.get("scaler")

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self._loss()
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if scaler is not None:
            closure()
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step(closure)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()
        if "average" in self.objects:
            self.objects["average"].update_parameters(self.model)
        self.steps += 1

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.step()
        return self

    def dicts(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.objects.items()}

    def take(self, dicts: Mapping[str, Any]) -> None:
        for name, item in self.objects.items():
            item.load_state_dict(dicts[name])

    def contents(self) -> dict[str, Any]:
        return copy.deepcopy(self.dicts())


def by_name(run: Run, *, flat: bool = False) -> dict[str, Any]:
    """The state dicts that torch's distributed checkpoints have."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    dicts = run.dicts() | {"model": get_model_state_dict(run.model)}  # first: an average has the same names
    return dicts | {"optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options)}


def take_by_name(run: Run, dicts: Mapping[str, Any], *, flat: bool = False) -> None:
    options = StateDictOptions(strict=False, flatten_optimizer_state_dict=flat)
    set_model_state_dict(run.model, dicts["model"])
    set_optimizer_state_dict(run.model, run.optimizer, dicts["optimizer"], options=options)
    for name, item in run.objects.items():
        if name not in ("model", "optimizer"):
            item.load_state_dict(dicts[name])


Flow = Callable[[Path, Run, Run], None]
"""Saves the first run, and resumes the second from that."""


def torch_save(_: Path, source: Run, target: Run) -> None:
    stream = io.BytesIO()
    torch.save(source.dicts(), stream)
    stream.seek(0)
    target.take(torch.load(stream, weights_only=False))


def objects(path: Path, source: Run, target: Run) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, source.objects)
    with fs.Checkpointer(path) as ckpt:
        ckpt.load(target.objects)


def numbered(path: Path, source: Run, target: Run) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save_state_dict(1, source.dicts())
    dicts = target.dicts()
    with fs.Checkpointer(path) as ckpt:
        ckpt.load_state_dict(dicts)
    target.take(dicts)


def objects_into_dicts(path: Path, source: Run, target: Run) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, source.objects)
    dicts = target.dicts()
    with fs.Checkpointer(path) as ckpt:
        ckpt.load_state_dict(dicts)
    target.take(dicts)


def read_as_dicts(path: Path, source: Run, target: Run) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save(1, source.objects)
    target.take(fs.open(path).state_dict())


def named(path: Path, source: Run, target: Run, *, flat: bool = False) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save_state_dict(1, by_name(source, flat=flat))
    dicts = by_name(target, flat=flat)
    with fs.Checkpointer(path) as ckpt:
        ckpt.load_state_dict(dicts)
    take_by_name(target, dicts, flat=flat)


def flattened(path: Path, source: Run, target: Run) -> None:
    named(path, source, target, flat=True)


def named_into_objects(path: Path, source: Run, target: Run) -> None:
    with fs.Checkpointer(path) as ckpt:
        ckpt.save_state_dict(1, by_name(source))
    with fs.Checkpointer(path) as ckpt:
        ckpt.load(target.objects)


def through_dcp(path: Path, source: Run, target: Run) -> None:
    dcp.save(by_name(source), storage_writer=FlowstoneWriter(path), no_dist=True)
    dicts = by_name(target)
    dcp.load(dicts, storage_reader=FlowstoneReader(path), no_dist=True)
    take_by_name(target, dicts)


def staged_by_dcp(path: Path, source: Run, target: Run) -> None:
    writer = FlowstoneWriter(path)
    dcp.async_save(by_name(source), storage_writer=writer, async_stager=FlowstoneStager(), no_dist=True).result()
    dicts = by_name(target)
    dcp.load(dicts, storage_reader=FlowstoneReader(path), no_dist=True)
    take_by_name(target, dicts)


def through_lightning(path: Path, source: Run, target: Run) -> None:
    """What of its adapter needs no Lightning."""
    saves = LightningSaves(fs.EngineOptions())
    saves.save(target_of(path, None), validated(source.dicts()), keep_name=True, in_background=True)
    saves.close()
    target.take(read(path))


def through_torchs_dcp(path: Path, source: Run, target: Run) -> None:
    beside = path.with_name("torch")
    dcp.save(by_name(source), checkpoint_id=beside, no_dist=True)
    dicts = by_name(target)
    dcp.load(dicts, checkpoint_id=beside, no_dist=True)
    take_by_name(target, dicts)


FLOWS: Mapping[str, Flow] = {
    "objects": objects, "numbered": numbered, "objects into dicts": objects_into_dicts, "read": read_as_dicts,
    "named": named, "flattened": flattened, "named into objects": named_into_objects, "DCP": through_dcp,
    "DCP staged": staged_by_dcp, "Lightning": through_lightning,
}
BY_NAME = frozenset({"named", "flattened", "named into objects", "DCP", "DCP staged"})


REFUSED: Mapping[str, Mapping[str, str]] = {
    "flattened": {"a flattened dict cannot do without some entries": "not flattened"},
    "objects into dicts": {
        "a dict does not show the optimizer inside": "optimizer.base.state",
        "the dict of several optimizers has another form": "optimizer.state.model.a.weight.step: in the checkpoint",
    },
    "numbered": {
        "the dict of a new wrapper has no room for its tensors": "optimizer.slow.0.slow: in the checkpoint",
        "the dicts of new optimizers in a list have no room for theirs": "optimizer.0.state.0.step: in the checkpoint",
    },
}
"""By flow: what a load refuses by name, though it was saved: it loads into the objects, whatever was saved."""


class Case(NamedTuple):
    """One cell of the matrix. `live`: the target has trained on, and goes back."""

    optimizer: str
    scheduler: str
    setting: str
    flow: str
    live: bool

    def __str__(self) -> str:
        return "/".join([*self[:4], "live" if self.live else "fresh"])


def cases() -> Iterator[Case]:
    """Every case that torch can train: optimizers with all schedulers, and those with all settings."""
    pairs = [(scheduler, "plain") for scheduler in SCHEDULERS] + [("StepLR", how) for how in SETTINGS if how != "plain"]
    for optimizer, (scheduler, setting), flow in itertools.product(OPTIMIZERS, pairs, FLOWS):
        yield from (Case(optimizer, scheduler, setting, flow, live) for live in (False, True))


def sample(seed: int, count: int) -> list[Case]:
    """So many cases, with each optimizer, scheduler, setting and flow among them."""
    drawn, result = random.Random(seed), list(cases())
    drawn.shuffle(result)
    chosen: dict[Case, None] = {}
    for field in range(4):
        for value in dict.fromkeys(case[field] for case in result):
            chosen[next(case for case in result if case[field] == value and _is_trainable(case))] = None
    return list(dict.fromkeys([*chosen, *result]))[:count]


def _is_trainable(case: Case) -> bool:
    try:
        Run(*case[:2], SETTINGS[case.setting]).train(BEFORE)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, AssertionError):
        return False  # torch itself refuses the pair
    return True


def outcome(case: Case, path: Path) -> str:
    """"equal", or why the case says nothing, or "refused: ..."; anything else is an error that is raised."""
    setting = SETTINGS[case.setting]

    def run(seed: int) -> Run:
        return Run(case.optimizer, case.scheduler, setting, seed)

    if not _is_trainable(case):
        return "torch does not train this"
    source = run(0).train(BEFORE)
    if case.flow in BY_NAME and type(source.optimizer).__module__.partition(".")[0] != "torch":
        return "torch has no names for this"
    if case.flow == "read" and (case.optimizer == "Several" or setting.averaged):
        return "reads without what wrappers add"

    def resumed(flow: Flow) -> dict[str, Any]:
        target = run(1)
        if case.live:
            target.train(BETWEEN)
        target.steps = BEFORE
        flow(path, source, target)
        return target.train(AFTER).contents()

    try:
        expected = resumed(through_torchs_dcp if "DCP" in case.flow else torch_save)
        if case.flow in BY_NAME:
            by_name(run(1), flat=case.flow == "flattened")
    except (Exception, dcp.api.CheckpointException):
        return "torch does not resume this"
    try:
        actual = resumed(FLOWS[case.flow])
    except fs.UnsupportedStateError as error:
        return f"refused: {error.message}"
    except fs.MismatchError as error:
        reason = next((why for why, words in REFUSED.get(case.flow, {}).items() if words in str(error)), None)
        if reason is None:
            raise
        return f"refused: {reason}"
    differences = list(differing(expected, actual))
    if differences and not list(differing(source.train(AFTER).contents(), actual)):
        return "equal to a run that was not interrupted, which torch's is not"
    assert not differences, f"{case}: {', '.join(differences[:5])}"
    return "equal"


def differing(one: object, other: object, path: str = "") -> Iterator[str]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield path
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            if key in one and key in other:
                yield from differing(one[key], other[key], f"{path}.{key}")
            elif (one if key in one else other)[key] != {}:  # torch makes empty dicts of slots at times
                yield f"{path}.{key} (only in {'torch.save' if key in one else 'flowstone'})"
    elif isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):  # type: ignore[arg-type]
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):  # type: ignore[call-overload]
            yield from differing(mine, theirs, f"{path}.{i}")
    elif type(one) is not type(other) or one != other:
        yield f"{path}: {one!r:.40} != {other!r:.40}"


def main(arguments: list[str]) -> int:
    """Run all cases, or those whose names have the given words; say how they ended."""
    warnings.simplefilter("ignore")
    ended: dict[str, int] = {}
    failed = 0
    for case in cases():
        if all(word in str(case) for word in arguments):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = outcome(case, Path(folder) / "run")
                except (Exception, dcp.api.CheckpointException) as error:
                    failed, result = failed + 1, "FAILED"
                    print(f"{case}: {type(error).__name__}: {error!s:.400}", flush=True)
            ended[result] = ended.get(result, 0) + 1
    print(ended)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
