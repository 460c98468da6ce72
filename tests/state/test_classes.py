"""Objects in configurations: stored with their types, and created again without running their code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import types
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from reference import load, save, stored

import flowstone as fs
from flowstone.errors import MismatchError, ProviderError, UnsupportedFormatError, UnsupportedStateError
from flowstone.state import prepare
from own_process import run_in_own_process, warnings_heard


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Mode(enum.IntFlag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Config:
    rate: float
    color: Color = Color.RED
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tags.append("made by code")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    path: PurePosixPath
    weights: tuple[float, ...]


class Point(NamedTuple):
    x: int
    y: object


def config(rate: float) -> Config:
    made = Config(rate, Color.BLUE, ["a"])
    made.tags[:] = ["a", str(rate)]
    return made


ZONE = zoneinfo.ZoneInfo("UTC")
VALUES: dict[str, Any] = {
    "Namespace": argparse.Namespace(lr=0.1, layers=[1, 2], nested=argparse.Namespace(x=None)),
    "SimpleNamespace": types.SimpleNamespace(a=1, b=(2, 3)),
    "defaultdict": collections.defaultdict(list, {"a": [1], 2: []}),
    "Counter": collections.Counter("hello"),
    "Fraction": Fraction(-3, 7),
    "Decimal": Decimal("1.10"),
    "path": Path("/data/run"),
    "pure paths": [PurePosixPath("a/b"), PureWindowsPath("c:/x")],
    "datetime": datetime.datetime(2026, 3, 1, 12, 30, 1, 5, tzinfo=ZONE, fold=1),
    "plain datetime": datetime.datetime(2026, 3, 1),  # noqa: DTZ001
    "offset": datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    "date": datetime.date(2026, 3, 1),
    "time": datetime.time(1, 2, 3, 4),
    "timedelta": datetime.timedelta(days=-1, seconds=5, microseconds=7),
    "UUID": uuid.UUID(int=2**100 + 1),
    "enum": Color.BLUE,
    "flag": Mode.READ | Mode.WRITE,
    "dataclass": config(0.5),
    "frozen": Frozen(PurePosixPath("x"), (1.5, 2.5)),
    "NamedTuple": Point(1, {"deep": Point(2, Decimal(3))}),
    "set": {Color.RED, Decimal(1), PurePosixPath("p"), (1, Fraction(1, 2))},
    "keys": {Color.RED: 1, uuid.UUID(int=1): 2, datetime.date(2026, 1, 1): Color.BLUE},
    "range": range(3, 9, 2),
    "np.float32": np.float32(1.5),
    "datetime64": np.datetime64("2026-03-01"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str) -> None:
    target: dict[str, object] = {"s": {"v": VALUES[name], "n": None}}
    fresh: dict[str, object] = {"s": {"v": 0, "kept": None, "n": None, "known": [Color.RED, Mode.READ, config(0)]}}
    fresh["s"]["known"] += [Frozen(PurePosixPath(""), ()), Point(0, 0)]  # type: ignore[index]
    checkpoint = save({**target, "known": fresh["s"]["known"]})  # type: ignore[index]
    for state in (target, {"s": {"v": 0, "n": 1}, "known": fresh["s"]["known"]}):  # type: ignore[index]
        load(checkpoint, state)
        actual = state["s"]["v"]  # type: ignore[index]
        assert type(actual) is type(VALUES[name])
        assert repr(actual) == repr(VALUES[name])
        assert actual == VALUES[name]


def test_a_time_keeps_its_zone_and_its_fold() -> None:
    state: dict[str, Any] = {"t": None}
    load(save({"t": VALUES["datetime"]}), state)
    assert (state["t"].tzinfo, state["t"].fold) == (ZONE, 1)


def test_an_existing_object_is_filled_and_no_code_of_it_runs() -> None:
    checkpoint = save({"c": config(0.5), "n": argparse.Namespace(a=1)})
    made, names = config(9), argparse.Namespace(a=0, stale=True)
    held, tags = {"c": made, "n": names}, made.tags
    load(checkpoint, held)
    assert held["c"] is made
    assert made == config(0.5)
    assert made.tags is tags
    assert vars(names) == {"a": 1}


def test_a_stream_keeps_its_bytes_and_its_position() -> None:
    for size in (10, 100_000):
        stream, other = io.BytesIO(b"x" * size), io.BytesIO(b"other")
        stream.seek(3)
        load(save({"s": {"stream": stream}}), held := {"s": {"stream": other}})
        assert held["s"]["stream"] is other
        assert (other.getvalue(), other.tell()) == (b"x" * size, 3)


@pytest.mark.parametrize("array", [
    np.array([["a", "bcd"], ["", "é"]]), np.array([b"x", b"yz"]), np.array(["a"], ">U3"), np.array("scalar"),
    np.array([1, "two", None, Decimal(3)], dtype=object), np.array([], "<U4"),
], ids=["text", "bytes", "big-endian", "scalar", "objects", "empty"])
def test_an_array_of_text_or_objects_comes_back(array: np.ndarray) -> None:
    for target in (None, array.copy()):
        held: dict[str, Any] = {"a": {"v": target}}
        load(save({"a": {"v": array}}), held)
        actual = held["a"]["v"]
        assert (actual.dtype, actual.shape, actual.tolist()) == (array.dtype, array.shape, array.tolist())


@dataclasses.dataclass
class Trained:
    weight: torch.Tensor
    inner: torch.nn.Module
    step: int


def test_tensors_and_modules_in_fields_are_written_in_place() -> None:
    source = Trained(torch.arange(3.0), torch.nn.Linear(2, 2), 7)
    target = Trained(torch.zeros(3), torch.nn.Linear(2, 2), 0)
    held, weight = {"t": target, "d": collections.defaultdict(list, {"w": torch.zeros(2)})}, target.weight
    kept = held["d"]["w"]  # type: ignore[index]
    checkpoint = save({"t": source, "d": collections.defaultdict(list, {"w": torch.ones(2)})})
    assert set(checkpoint.tensors) == {"t.weight", "t.inner.weight", "t.inner.bias", "d.w"}
    load(checkpoint, held)
    assert held["t"] is target
    assert target.weight is weight
    assert weight.tolist() == [0, 1, 2]
    assert torch.equal(target.inner.weight, source.inner.weight)  # type: ignore[arg-type]
    assert target.step == 7
    assert kept.tolist() == [1, 1]


def test_tensors_in_a_named_tuple_keep_their_memory() -> None:
    held: dict[str, Any] = {"p": Point(1, torch.zeros(2))}
    tensor = held["p"].y
    load(save({"p": Point(5, torch.ones(2))}), held)
    assert type(held["p"]) is Point
    assert held["p"].x == 5
    assert held["p"].y is tensor
    assert tensor.tolist() == [1, 1]


class Loader:
    """An object whose state_dict() is made of such values."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("name", ["enum", "flag", "dataclass", "NamedTuple", "defaultdict", "keys"])
def test_in_a_state_dict_the_classes_are_those_that_the_live_one_shows(name: str) -> None:
    target = Loader({"v": [VALUES[name]]})
    load(save({"l": Loader({"v": [VALUES[name]]})}), {"l": target})
    assert repr(target.state) == repr({"v": [VALUES[name]]})


class Scale(torch.nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return {"v": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["v"]


def test_in_extra_state_and_settings_of_groups_the_live_ones_show_the_classes() -> None:
    class Kind(enum.Enum):
        A = 1
        B = 2

    def made(kind: Kind) -> tuple[Scale, torch.optim.Optimizer]:
        module = Scale(kind)
        module.weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.param_groups[0]["kind"] = kind
        return module, optimizer

    module, optimizer = made(Kind.A)
    target, its_optimizer = made(Kind.B)
    load(save({"m": module, "o": optimizer}), {"m": target, "o": its_optimizer})
    assert target.value is Kind.A
    assert its_optimizer.param_groups[0]["kind"] is Kind.A


def test_a_state_dict_keeps_its_attributes() -> None:
    tree = collections.OrderedDict([("a", torch.ones(2)), ("n.c", torch.zeros(1))])
    tree._metadata = collections.OrderedDict([("", {"batch": torch.Size([2])}), ("n", {"v": 1})])  # type: ignore[attr-defined]
    target = Loader({})
    load(save({"l": Loader(tree)}), {"l": target})
    assert type(target.state) is collections.OrderedDict
    assert list(target.state) == ["a", "n.c"]
    assert target.state["a"].tolist() == [1, 1]
    assert vars(target.state) == vars(tree)


def test_a_class_that_nothing_knows_is_refused_before_anything_changes() -> None:
    class Mine(NamedTuple):
        x: int

    class Level(enum.Enum):
        LOW = 1

    checkpoint = save({"s": {"v": Mine(1)}, "w": torch.ones(1)})
    target = torch.zeros(1)
    differences = prepare({"s": {"v": None}, "w": target}, stored(checkpoint)).differences
    assert [(difference.kind, difference.name) for difference in differences] == [("kind", "s.v")]
    assert "fs.register_class()" in differences[0].expected
    assert "Mine" in differences[0].stored
    with pytest.raises(UnsupportedFormatError, match="enumeration") as caught:
        prepare({"s": {"v": None}}, stored(save({"s": {"v": Level.LOW}})))
    assert "fs.register_class()" in str(caught.value)


def test_no_class_is_imported_because_a_file_names_it() -> None:
    checkpoint = save({"s": {"v": Point(1, 2)}})
    for name in ("subprocess.Popen", "builtins.list", "builtins.object", "os.environ", "test_classes.Loader"):
        checkpoint.objects["s"] = f'{{"v": {{"$provided": "{name}", "parts": {{}}, "objects": {{"x": 1, "y": 2}}}}}}'
        differences = prepare({"s": {"v": None}}, stored(checkpoint)).differences
        assert [(difference.kind, difference.name) for difference in differences] == [("kind", "s.v")]


def test_fields_that_the_class_does_not_have_are_refused() -> None:
    checkpoint = save({"s": {"v": Point(1, 2)}})
    checkpoint.objects["s"] = checkpoint.objects["s"].replace('"y"', '"z"')
    differences = prepare({"s": {"v": Point(0, 0)}}, stored(checkpoint)).differences
    assert [(difference.kind, difference.name) for difference in differences] == [("kind", "s.v")]


class Old:
    def __init__(self, x: int) -> None:
        self.x = x


def test_registered_classes_are_made_where_nothing_shows_them() -> None:
    @fs.register_class(name="tests.Later")
    @dataclasses.dataclass
    class Later:
        x: int

    fs.register_class(Old, fields=lambda value: {"x": value.x}, create=lambda fields: Old(fields["x"] + 1))  # type: ignore[operator]
    checkpoint = save({"s": {"a": Later(1), "b": Old(1)}})
    assert "tests.Later" in checkpoint.objects["s"]
    held: dict[str, Any] = {"s": {"a": None, "b": None}}
    load(checkpoint, held)
    assert held["s"]["a"] == Later(1)
    assert held["s"]["b"].x == 2


def factory() -> int:
    return 0


RISKY: dict[str, tuple[object, Any]] = {
    "dataclass": (Frozen(PurePosixPath("x"), (1.5,)), Frozen), "enum": (Color.RED, Color), "flag": (Mode.READ, Mode),
    "NamedTuple": (Point(1, 2), Point), "key": ({Color.RED: 1}, Color), "member of a set": ({Color.RED}, Color),
    "in a state_dict": (Loader({"v": [Color.RED]}), Color), "factory": (collections.defaultdict(factory), factory),
    "factory that is a class": (collections.defaultdict(Old), Old),
}


def _save_a_risky_value(path: Path, name: str, registered: Any) -> list[str]:
    value = RISKY[name][0]
    if registered is not None:
        _register(registered)
    with warnings_heard() as heard, fs.Checkpointer(path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"s": {"v": value}, "w": torch.ones(1)}).committed.result()
    return heard


def _load_where_nothing_shows_the_class(path: Path, name: str, registered: Any) -> str:
    value = RISKY[name][0]
    if registered is not None:
        _register(registered)
    empty = Loader({"v": []}) if isinstance(value, Loader) else {} if type(value) is dict else None
    state: dict[str, Any] = {"s": {"v": empty}, "w": torch.zeros(1)}
    with fs.Checkpointer(path) as ckpt:
        try:
            ckpt.load(state)
        except (MismatchError, UnsupportedFormatError) as error:
            return str(error)
    result = state["s"]["v"]
    assert repr(result.state if isinstance(result, Loader) else result) == repr(getattr(value, "state", value))
    return ""


def _register(own: type) -> None:
    if own is Old:
        fs.register_class(Old, fields=vars, create=lambda fields: Old(**fields))  # type: ignore[arg-type]
    else:
        fs.register_class(own)


@pytest.mark.parametrize("name", RISKY)
def test_a_save_warns_of_a_class_without_which_another_process_could_not_load(tmp_path: Path, name: str) -> None:
    own = RISKY[name][1]
    (heard,) = run_in_own_process(_save_a_risky_value, tmp_path, name, None)
    assert "'s.v" in heard
    assert f"{__name__}.{own.__name__}, is not registered" in heard
    assert "register" in heard.rpartition(". ")[2]
    refused = run_in_own_process(_load_where_nothing_shows_the_class, tmp_path, name, None)
    assert "fs.register_class()" in refused


@pytest.mark.parametrize("name", [name for name in RISKY if name != "factory"])
def test_a_registered_class_is_saved_without_a_warning_and_loads_anywhere(tmp_path: Path, name: str) -> None:
    assert run_in_own_process(_save_a_risky_value, tmp_path, name, RISKY[name][1]) == []
    assert run_in_own_process(_load_where_nothing_shows_the_class, tmp_path, name, RISKY[name][1]) == ""


def _save_after_a_load_that_shows_the_class(path: Path) -> list[str]:
    with warnings_heard() as heard, fs.Checkpointer(path) as ckpt:
        ckpt.load({"s": {"v": Color.BLUE}, "w": torch.zeros(1)})
        ckpt.save(3, {"s": {"v": Color.BLUE}, "w": torch.ones(1)}).committed.result()
    return heard


def test_a_save_does_not_warn_where_the_live_state_of_a_load_had_the_class(tmp_path: Path) -> None:
    run_in_own_process(_save_a_risky_value, tmp_path, "enum", Color)
    assert run_in_own_process(_save_after_a_load_that_shows_the_class, tmp_path) == []


@pytest.mark.parametrize("own", [object, 3, Loader, "text"])
def test_what_has_no_fields_cannot_be_registered(own: Any) -> None:
    with pytest.raises(ProviderError, match=r"register|not a dataclass"):
        fs.register_class(own)
    fs.register_class(Color)
    with pytest.raises(ProviderError, match="second class"):
        fs.register_class(Mode, name=f"{__name__}.Color")


class Text(str):
    __slots__ = ()


class Zone(datetime.tzinfo):
    pass


UNSUPPORTED: dict[str, object] = {
    "str subclass": Text("x"), "object": object(), "function": lambda: 0, "StringIO": io.StringIO("x"),
    "lambda": collections.defaultdict(lambda: 0), "zone": datetime.datetime(2026, 1, 1, tzinfo=Zone()),
    "class": Config, "structured": np.zeros(2, [("a", "i4")]), "ChainMap": collections.ChainMap(),
}


@pytest.mark.parametrize("value", UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_what_cannot_be_stored_is_refused_at_save(value: object) -> None:
    with pytest.raises(UnsupportedStateError, match=r"'s\.c\.v"):
        save({"s": {"c": {"v": value}}})


def test_typed_values_are_shown_without_their_classes(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"c": config(0.5), "w": torch.ones(1)}).committed.result()
        with pytest.raises(MismatchError):
            ckpt.load({"c": torch.ones(1), "w": torch.ones(1)})
    node = fs.open(tmp_path).objects["c"]
    assert node.kind == f"{__name__}.Config"  # type: ignore[attr-defined]
    assert node.objects["rate"] == 0.5  # type: ignore[attr-defined]
