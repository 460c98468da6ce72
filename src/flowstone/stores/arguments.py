"""Check the arguments of public calls, and normalise them, before anything happens."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from flowstone.config import LAG_STEPS, LAG_STEPS_MAX, STEP_MAX, EngineOptions, Keep, KeepRule, whole_number
from flowstone.errors import ArgumentError, ClosedError, StorageError
from flowstone.extensions import extension, find_extension
from flowstone.rules.load_rules import Rule
from flowstone.store.base import Store, missing_methods
from flowstone.store.local import LocalStore

if TYPE_CHECKING:
    from flowstone.codecs.quantize import Quantize
    from flowstone.layouts.layout_rules import LoadRule
    from flowstone.store.memory.node_memory import NodeMemory
    from flowstone.store.urls import ObjectUrl

_FIRST_NOTE = "path-1.json"  # a file that only stores with several paths have (store/striped/records.py)
_MEMORY = re.compile(r"memory:/{1,2}(?=[^/]|$)")
_SCHEMES = frozenset({
    "abfs", "abfss", "adl", "az", "azure", "file", "ftp", "gcs", "gs", "hdfs", "hf", "http", "https", "memory", "oci",
    "oss", "r2", "s3", "s3a", "sftp", "ssh", "webdav", "wasb", "wasbs",
})
"""`pathlib.Path` merges the two slashes of a URL. A text with one slash is a URL only if its scheme is one of these."""


def check_open(location: str, *, closed: bool, pid: int) -> None:
    """Raise ClosedError if the Checkpointer of that store is `closed`, or was created by `pid`, another process."""
    if closed:
        raise ClosedError(f"the Checkpointer of {location} is closed", next="create a new one")
    if os.getpid() != pid:
        raise ClosedError(
            f"the Checkpointer of {location} belongs to process {pid}; this process is a fork of it",
            next="create one in this process, after the fork",
        )


def step_number(step: object, *, verb: str) -> int:
    """`step` as an int: accepts any integer, also numpy's and one-element tensors; refuses bool and float.

    raises  ArgumentError
    """
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError("a step cannot be a bool")
        number = operator.index(step)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        raise ArgumentError(
            f"{verb}: step {shown(step)} is not an integer within 0..{STEP_MAX}", found=type_name(step),
            next="give the number of the training step: an int, or a numpy integer or tensor that holds one",
        ) from None
    if not 0 <= number <= STEP_MAX:
        raise ArgumentError(
            f"{verb}: step {number} is not an integer within 0..{STEP_MAX}",
            next="number training steps from 0; do not use a time or a hash",
        )
    return number


def to_save(step: object, state: object, fence: object) -> tuple[int, Mapping[str, object], Literal["auto", "manual"]]:
    """Check the arguments of `save`, and return them with their types. Raises ArgumentError."""
    if _is_state(step) and not _is_state(state):
        raise ArgumentError(
            "save: the arguments are in the wrong order", found=f"save({type_name(step)}, {shown(state)})",
            next="write save(step, state)",
        )
    number = step_number(step, verb="save")
    if fence not in ("auto", "manual"):
        raise ArgumentError(
            f"save: fence {shown(fence)} is neither 'auto' nor 'manual'",
            next="leave it out; or give 'manual', and call fence() before you change the state",
        )
    return number, cast("Mapping[str, object]", state), fence  # the walk over the state reports other types


def to_prepare(state: object) -> Mapping[str, object]:
    """Check the argument of `prepare`, and return it. Raises ArgumentError."""
    if _is_number(state):
        raise ArgumentError(
            f"prepare: expected a state, got {shown(state)}", next="write prepare(state), without a step"
        )
    return cast("Mapping[str, object]", state)


def to_load(
    state: object, step: object, rules: object, flags: Mapping[str, object]
) -> tuple[Mapping[str, object], int | None, tuple[LoadRule, ...]]:
    """Check the arguments of `load`, and return state, step and rules. `flags`: arguments that must be True or False.
    Raises ArgumentError.
    """
    if not _is_state(state) and step is None and _is_number(state):
        raise ArgumentError(
            f"load: expected a state as the first argument, got step {shown(state)}",
            next=f"write load(state, step={shown(state)})",
        )
    number = None if step is None else step_number(step, verb="load")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentError(f"load: {name} {shown(flag)} is neither True nor False", next="give True or False")
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, type):  # a load would replace the class; a save refuses classes when it lists the state
            raise ArgumentError(
                f"load: state[{name!r}] is the class {type_name(value)}", expected="an instance of it",
                next=f"pass the instance that you train, not {value.__qualname__}",
            )
    return cast("Mapping[str, object]", state), number, to_rules(rules)


def to_rules(rules: object) -> tuple[LoadRule, ...]:
    """Rules as a tuple; a single rule is accepted. Raises ArgumentError for anything else."""
    if rules == ():
        return ()
    layouts = find_extension("layouts.kinds")
    kinds = (Rule, *(() if layouts is None else layouts()))
    if isinstance(rules, kinds):
        return (rules,)
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise ArgumentError(
            f"rules: {shown(rules)} is not a sequence of rules", next="give a list: rules=[fs.Skip('model.head.*')]"
        )
    for rule in rules:
        if not isinstance(rule, kinds):
            pattern = repr(rule) if isinstance(rule, str) else "'model.head.*'"
            raise ArgumentError(
                f"rules: {shown(rule)} is not a rule",
                expected="fs.Rename, fs.Skip, fs.Init, fs.Cast, fs.Split, ..., or an fs.RuleSet",
                next=f"say what may differ: fs.Skip({pattern}), fs.Init({pattern}), ...",
            )
    return tuple(rules)


def to_quantize(rules: object, every_step: object) -> tuple[Quantize, ...]:
    """Rules of saves as a tuple; a single rule is accepted. Raises ArgumentError for anything else."""
    if rules == ():
        return ()
    kind: type[Quantize] = extension("codecs.quantize")
    given = (rules,) if isinstance(rules, kind) else rules
    if isinstance(given, Sequence) and not isinstance(given, str | bytes) and (
        all(isinstance(rule, kind) for rule in given)
    ):
        if given and every_step:
            raise ArgumentError(
                "rules cannot be used with every_step: a rounded state does not replay steps exactly",
                next="leave one of the two out",
            )
        return tuple(given)
    raise ArgumentError(
        f"rules: {shown(rules)} is not a sequence of fs.Quantize",
        next="write rules=[fs.Quantize('optimizer.*.exp_avg*')]; other rules are for load",
    )


def _is_state(value: object) -> bool:
    """Whether `value` could be a training state."""
    return isinstance(value, Mapping) or hasattr(value, "state_dict")


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (hasattr(value, "__index__") and getattr(value, "shape", None) == ())


def store_path(path: object) -> Path:
    """The directory that `path` names, as an absolute path; `~` is the home directory.

    raises  ArgumentError if it names no directory: a URL, an empty text, another type
            StorageError if the path is relative and the current directory no longer exists
    """
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ArgumentError(
            f"{shown(path)} is not a path", expected="a str or a pathlib.Path that names a directory",
            found=type_name(path), next=_remedy_of(path),
        )
    if not text.strip() or "\0" in text:
        raise ArgumentError(
            f"the path {text!r} does not name a directory",
            next="give the directory for the checkpoints; '.' is the current one. Is a variable unset?",
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"the path {text!r} is not UTF-8", next="rename the directory, or give another path"
        ) from None
    _refuse_url(text)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ArgumentError(f"the home directory of {text!r} is unknown", next="write the full path") from None
    except OSError as error:
        raise StorageError(
            f"the path {text!r} is relative, and the current directory is gone", errno=error.errno or 0,
            reason=error.strerror, next="change to a directory that exists, or give an absolute path",
        ) from error


def conversion_target(path: object) -> Path | ObjectUrl:
    """The target of a conversion: a directory or file, which need not exist yet, or the URL of an object store.

    raises  ArgumentError
    """
    url = object_url(path)
    if url is not None:
        return url
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{shown(path)} is not a path to write to", expected="a str or a pathlib.Path", found=type_name(path),
            next="give a new directory, or file; or the URL of an object store",
        )
    return store_path(path)


def to_section(section: object) -> str:
    """The name of a section. Raises ArgumentError."""
    if isinstance(section, str):
        return section
    raise ArgumentError(
        f"section {shown(section)} is not a name", found=type_name(section), next="give a str, as in section='model'"
    )


def check_work(*, on_progress: object = None, cluster: object = None) -> None:
    """Raise ArgumentError unless `on_progress` is callable and `cluster` is a cluster."""
    if on_progress is not None and not callable(on_progress):
        raise ArgumentError(
            f"on_progress {shown(on_progress)} is not callable",
            next="give a function of two arguments: bytes done, and bytes in total",
        )
    if cluster is not None and not hasattr(cluster, "each"):
        raise ArgumentError(
            f"cluster {shown(cluster)} is not a cluster", next="leave it out, or give one of flowstone.cluster"
        )


def _refuse_url(text: str) -> None:
    """Raise ArgumentError if the path is a URL."""
    if ":/" not in text:
        return
    from flowstone.store.urls import FSSPEC, SCHEMES, URL, without_secrets  # imported here: most paths are no URLs

    url = URL.match(text)
    if url is None or (url[2] == "/" and url[1].lower() not in _SCHEMES):
        return
    scheme = url[1].lower()
    shown_url = without_secrets(text)
    inside = shown_url.partition(":")[2].lstrip("/")
    is_object = scheme in SCHEMES or scheme.startswith(FSSPEC)
    remedy = f"write only the path: '/{inside}'"
    if scheme != "file":
        other = "use a directory and copy checkpoints from there" if is_object else (
            f"if fsspec supports it, write fsspec+{scheme}://{inside}"
        )
        remedy = f"mount it as a file system and give that path, or {other}"
    expected = "a directory of a mounted file system"
    if is_object:
        expected += ": this call does not accept object stores"
    raise ArgumentError(f"{shown_url!r} is a URL", expected=expected, next=remedy)


def object_url(path: object) -> ObjectUrl | None:
    """The path as the URL of an object store, or None. Raises ArgumentError for an ambiguous URL."""
    if not isinstance(path, str | os.PathLike) or ":/" not in str(path):
        return None
    from flowstone.store import urls  # imported here: most paths are no URLs

    return urls.object_url(path)


def refuse_object_url(path: object) -> None:
    """Raise ArgumentError for the URL of an object store, given to a call that accepts only directories."""
    url = object_url(path)
    if url is not None:
        _refuse_url(url)


def _remedy_of(path: object) -> str:
    """A text for an error message: what to give instead of an argument that is not a path."""
    location = getattr(path, "path", None)
    if isinstance(location, str):
        return f"give the path of its store: {os.path.dirname(location)!r}"
    return "give the directory for the checkpoints"


def memory_of(path: object) -> NodeMemory | None:
    """The store in this node's memory that a URL names (memory://run); None for anything else. Raises ArgumentError."""
    text = str(path) if isinstance(path, str | os.PathLike) else ""
    match = _MEMORY.match(text)
    if match is None:
        return None
    return cast("NodeMemory", extension("memory")(text[match.end() :]))


def is_list(path: object) -> bool:
    """Whether `path` is a list of stores."""
    return isinstance(path, Sequence) and not isinstance(path, str | bytes)


def to_store(path: object) -> Path | ObjectUrl | Store:
    """The directory or URL of a store, or a store in this node's memory, or the object itself if it is a store.

    raises  ArgumentError for an object that has only some methods of a store, or cannot commit; also the errors of
            `store_path`
    """
    missing = missing_methods(path)
    if not missing:
        store = cast("Store", path)
        if not (store.capabilities.atomic_rename or store.capabilities.conditional_put):
            raise ArgumentError(
                f"{shown(path)} cannot commit a checkpoint", found=str(store.capabilities),
                expected="atomic_rename, or conditional_put",
                next="see docs/ORDERING.md for the requirements on a store",
            )
        return store
    if not hasattr(path, "capabilities"):
        url = object_url(path)
        return url or memory_of(path) or store_path(path)
    words = "; ".join(f"of {protocol}: {', '.join(names)}" for protocol, names in missing.items())
    raise ArgumentError(
        f"{shown(path)} lacks methods of a store", missing=words,
        next="implement these, or wrap a store in a subclass of flowstone.store.wrap.Wrapper",
    )


def store_at(place: Path | ObjectUrl | Store, options: EngineOptions | None = None) -> Store:
    """The store for a directory or a URL. If `place` is a store already, it is returned."""
    if isinstance(place, Path):
        return with_paths(LocalStore(place, options), options)
    if isinstance(place, str):
        return cast("Store", extension("objects")(place, options))
    return place


def with_paths(store: LocalStore, options: EngineOptions | None = None) -> Store:
    """The store itself; or, if its directory is the first path of a store with several paths, that striped store
    (docs/FORMAT.md, Paths).
    """
    if not os.path.lexists(store.root / _FIRST_NOTE):
        return store

    def opened(location: str) -> Store:
        place = to_store(location)
        return LocalStore(place, options) if isinstance(place, Path) else store_at(place, options)

    watch = (options or EngineOptions()).watch
    return cast("Store", extension("striped")([store], opened=opened, watch=watch, writes_noted=True))


def striped_parent(place: object, options: EngineOptions | None = None) -> tuple[Store, str] | None:
    """If `place` is a checkpoint's directory in a store with several paths: that store, and the name of the directory
    in it. Otherwise None.
    """
    if not isinstance(place, Path) or not os.path.lexists(place.parent / _FIRST_NOTE):
        return None
    return store_at(place.parent, options), place.name


def to_options(given: Mapping[str, object]) -> tuple[Keep | KeepRule | None, int | None, int | None, int, float]:
    """Check options of a Checkpointer, and return these: keep, budget_bytes, max_unsaved_steps, saves_in_flight and
    deadline_s.

    given   all options of the Checkpointer, by name
    raises  ArgumentError
    """
    on_error, engine, on_event, alone = given["on_error"], given["engine"], given["on_event"], given["alone"]
    budget_bytes, max_unsaved_steps, deadline_s = given["budget_bytes"], given["max_unsaved_steps"], given["deadline_s"]
    if on_error not in ("raise", "continue"):
        raise ArgumentError(
            f"on_error {shown(on_error)} is neither 'raise' nor 'continue'", next="leave it out to raise errors"
        )
    if not isinstance(engine, EngineOptions | None):
        raise ArgumentError(
            f"engine {shown(engine)} is not an EngineOptions", next="write engine=fs.EngineOptions(backend=..., ...)"
        )
    if on_event is not None and not callable(on_event):
        raise ArgumentError(
            f"on_event {shown(on_event)} is not callable", next="give a function of one argument, the event"
        )
    if not isinstance(alone, bool):
        raise ArgumentError(
            f"alone={shown(alone)} is neither True nor False", next="leave it out to save with all ranks"
        )
    if not isinstance(given["every_step"], bool) and not _is_replica(given["every_step"]):
        raise ArgumentError(
            f"every_step {shown(given['every_step'])} is neither True nor False, nor a Replica",
            next="leave every_step out for no journal",
        )
    if not _number("recovery_s", given["recovery_s"]) > 0:
        raise ArgumentError(
            f"recovery_s is {shown(given['recovery_s'])}, must be positive", next="give a number of seconds"
        )
    deadline = _number("deadline_s", deadline_s)
    if not deadline > 0:
        raise ArgumentError(f"deadline_s is {shown(deadline_s)}, must be positive", next="give a number of seconds")
    return (
        to_keep(given["keep"]),
        None if budget_bytes is None else _count("budget_bytes", budget_bytes, least=0),
        None if max_unsaved_steps is None else _count("max_unsaved_steps", max_unsaved_steps, least=0),
        _count("saves_in_flight", given["saves_in_flight"], least=1),
        deadline,
    )


def to_lag_steps(given: object, every_step: object) -> int:
    """How many steps may not be durable yet when `save` returns. Raises ArgumentError."""
    if not every_step and given != LAG_STEPS:
        raise ArgumentError(
            f"lag_steps {shown(given)} needs every_step: without every_step, a save is durable once its `committed` "
            "is done", next="give every_step=True as well, or leave lag_steps out",
        )
    if isinstance(given, float):
        raise ArgumentError(
            f"lag_steps {shown(given)} is not a whole number", found=type_name(given), next="give a number of steps"
        )
    number = whole_number("lag_steps", given)
    if not 1 <= number <= LAG_STEPS_MAX:
        raise ArgumentError(
            f"lag_steps {number} is not within 1..{LAG_STEPS_MAX}",
            next="give 1 if only the newest step may be lost, or a few more if the store syncs slowly",
        )
    return number


def _is_replica(value: object) -> bool:
    return isinstance(value, extension("replica.settings"))


def to_keep(keep: object) -> Keep | KeepRule | None:
    """Which checkpoints retention keeps; a number means the newest ones. Raises ArgumentError."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if callable(keep):
        return cast("KeepRule", keep)
    try:
        return Keep(last=_count("keep", keep, least=1))
    except ArgumentError:
        raise ArgumentError(
            f"keep={shown(keep)} is neither a Keep nor a number of checkpoints",
            next="write keep=fs.Keep(last=3, every=1000); or keep=3 for the newest three; or a function from committed "
            "steps to the steps to keep; or leave it out to keep all",
        ) from None


def _count(name: str, value: object, *, least: int) -> int:
    number = whole_number(name, value)
    if not least <= number < 1 << 62:
        limits, remedy = f"must be at least {least}", f"give {least} or more"
        if number > least:
            limits, remedy = f"must be less than {1 << 62}", f"give a number from {least} to {(1 << 62) - 1}"
        raise ArgumentError(f"{name} is {number}, {limits}", next=remedy)
    return number


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError("a bool or a text is not a number")
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{name} {shown(value)} is not a number", found=type_name(value), next="give a number of seconds"
        ) from None
    if math.isnan(number):
        raise ArgumentError(f"{name} is not a number", found="nan", next="give a number of seconds")
    return number


def type_name(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def shown(value: object) -> str:
    """An argument as text, on one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type_name(value)}"  # the repr of the argument has failed
    return text if len(text) <= 60 else f"{text[:60]}..."
