"""What another number of ranks has saved, as the files that DeepSpeed asks for on this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowstone.adapters.deepspeed.partitions import of_this_rank
from flowstone.adapters.deepspeed.pointers import read_pointer
from flowstone.adapters.deepspeed.repartition import SavedPartitions, frozen_fragment, stored_value
from flowstone.adapters.deepspeed.stored_files import file_names, read_file, section_of, stored_file
from flowstone.checkpoint import Checkpoint

_RANK = re.compile(r"(zero_pp_rank_)(\d+)(_mp_rank_\d+_(?:model|optim)_states\.pt$)")


def of_rank(place: Path, rank: int) -> Path:
    """The file of another data-parallel rank; the same one, where all have one file."""
    return place.with_name(_RANK.sub(rf"\g<1>{rank}\g<3>", place.name))


def for_this_rank(engine: Any, checkpoint: Checkpoint, name: str) -> Any:
    """A file's content. Where other ranks have saved, it is as if so many as there are now had.

    A rank's own values (buffers of stage 3) are those of rank r modulo the number that has saved.

    raises  NoTensorError  no rank has saved such a file
            StateError     the engine has another optimizer
            DamagedError   stored bytes are not what was written
    """
    is_model = section_of(name) == "model_states"
    if not is_model and section_of(name) != "optim_states":
        return read_file(checkpoint, name)
    saved = _names_of_all_ranks(checkpoint, name)
    ranks = _ranks_of_model(checkpoint, saved) if is_model else len(saved)
    if not engine.zero_optimization() or ranks in (0, engine.seq_dp_world_size):
        return read_file(checkpoint, name)
    flats = of_this_rank(engine)
    if flats is None:
        return read_file(checkpoint, name)  # DeepSpeed refuses it
    if is_model:
        return _model(engine, checkpoint, saved)
    states = [stored_file(checkpoint, one)["optimizer_state_dict"] for one in saved]
    shapes = stored_value(checkpoint, stored_file(checkpoint, _model_name(checkpoint))["param_shapes"])
    shapes = [{key: tuple(shape) for key, shape in group.items()} for group in shapes]
    partitions = SavedPartitions(checkpoint, states, shapes)
    content = {key: one for key, one in stored_file(checkpoint, saved[0]).items() if key != "optimizer_state_dict"}
    paddings = getattr(engine.optimizer, "round_robin_bit16_padding", None)
    return {**stored_value(checkpoint, content), "optimizer_state_dict": partitions.of(flats, paddings)}


@contextmanager
def model_file_names(engine: Any) -> Iterator[None]:
    """Within it, stage 3 asks for a file of the model that is there, though fewer ranks may have saved one each."""
    own = engine._get_all_ckpt_names

    def names(checkpoints_path: str, tag: str) -> list[str]:
        found: list[str] = own(checkpoints_path, tag)
        if found or not engine.zero_optimization_partition_weights():
            return found
        first = Path(engine._get_ckpt_name(checkpoints_path, tag, pp_placeholder="0"))
        if not first.exists() or read_pointer(first) is None:
            return found
        return [str(first)]  # `for_this_rank` finds this rank's

    engine._get_all_ckpt_names = names
    try:
        yield
    finally:
        del engine._get_all_ckpt_names


def _model(engine: Any, checkpoint: Checkpoint, saved: list[str]) -> Any:
    """What is the model's own: with one file for each rank (stage 3), or with one for all."""
    rank = torch.distributed.get_rank(group=engine.optimizer.dp_process_group)
    content = read_file(checkpoint, saved[rank % len(saved)])
    content["dp_world_size"] = engine.seq_dp_world_size
    if engine.zero_optimization_partition_weights() and content.get("frozen_param_fragments"):
        fragments = [stored_file(checkpoint, one)["frozen_param_fragments"] for one in saved]
        for name, shape in content["frozen_param_shapes"].items():
            content["frozen_param_fragments"][name] = frozen_fragment(
                checkpoint, [one[name] for one in fragments], shape, rank, engine.seq_dp_world_size
            )
    return content


def _names_of_all_ranks(checkpoint: Checkpoint, name: str) -> list[str]:
    """That file of all ranks that have saved one, in their order."""
    found = []
    for given in (str(one) for own in file_names(checkpoint) for one in own):
        if given == name or (_RANK.search(name) and of_rank(Path(given), 0).name == of_rank(Path(name), 0).name):
            match = _RANK.search(given)
            found.append((int(match[2]) if match else 0, given))
    return [given for _, given in sorted(found)]


def _ranks_of_model(checkpoint: Checkpoint, saved: list[str]) -> int:
    """How many data-parallel ranks have saved; 0 where no file says so."""
    found = stored_file(checkpoint, saved[0]).get("dp_world_size") if saved else None
    return found if isinstance(found, int) else 0


def _model_name(checkpoint: Checkpoint) -> str:
    names = [str(one) for own in file_names(checkpoint) for one in own]
    return next(name for name in names if section_of(name) == "model_states")
