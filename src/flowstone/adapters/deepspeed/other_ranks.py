"""Load a checkpoint on a different number of ranks than it was saved with: build the files that DeepSpeed expects on
this rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowstone.adapters.deepspeed.partitions import flats_of_this_rank
from flowstone.adapters.deepspeed.pointers import read_pointer
from flowstone.adapters.deepspeed.repartition import SavedPartitions, frozen_fragment, stored_value
from flowstone.adapters.deepspeed.stored_files import file_names, read_file, section_of, stored_file
from flowstone.reading.checkpoint import Checkpoint

_RANK = re.compile(r"(zero_pp_rank_)(\d+)(_mp_rank_\d+_(?:model|optim)_states\.pt$)")


def file_of_rank(place: Path, rank: int) -> Path:
    """The path of this file for another data-parallel rank. It is the same path if all ranks share the file."""
    return place.with_name(_RANK.sub(rf"\g<1>{rank}\g<3>", place.name))


def file_for_this_rank(engine: Any, checkpoint: Checkpoint, name: str) -> Any:
    """A file's content, as if the current number of ranks had saved it.

    Some values (buffers of stage 3) were saved by each rank. If n ranks saved, rank r gets those of
    rank r % n.

    raises  NoTensorError  no rank saved such a file
            StateError     the engine has another optimizer
            DamagedError   stored bytes do not match their digest
    """
    is_model = section_of(name) == "model_states"
    if not is_model and section_of(name) != "optim_states":
        return read_file(checkpoint, name)
    saved = _names_of_all_ranks(checkpoint, name)
    ranks = _ranks_of_model(checkpoint, saved) if is_model else len(saved)
    if not engine.zero_optimization() or ranks in (0, engine.seq_dp_world_size):
        return read_file(checkpoint, name)
    flats = flats_of_this_rank(engine)
    if flats is None:
        return read_file(checkpoint, name)  # DeepSpeed raises its own error
    if is_model:
        return _model(engine, checkpoint, saved)
    states = [stored_file(checkpoint, file_name)["optimizer_state_dict"] for file_name in saved]
    shapes = stored_value(checkpoint, stored_file(checkpoint, _model_name(checkpoint))["param_shapes"])
    shapes = [{key: tuple(shape) for key, shape in group.items()} for group in shapes]
    partitions = SavedPartitions(checkpoint, states, shapes)
    content = {key: entry for key, entry in stored_file(checkpoint, saved[0]).items() if key != "optimizer_state_dict"}
    paddings = getattr(engine.optimizer, "round_robin_bit16_padding", None)
    return {**stored_value(checkpoint, content), "optimizer_state_dict": partitions.state_for(flats, paddings)}


@contextmanager
def model_file_names(engine: Any) -> Iterator[None]:
    """Context in which DeepSpeed's stage 3 finds a model file for this rank, even if fewer ranks saved than load."""
    own = engine._get_all_ckpt_names

    def names(checkpoints_path: str, tag: str) -> list[str]:
        files: list[str] = own(checkpoints_path, tag)
        if files or not engine.zero_optimization_partition_weights():
            return files
        first = Path(engine._get_ckpt_name(checkpoints_path, tag, pp_placeholder="0"))
        if not first.exists() or read_pointer(first) is None:
            return files
        return [str(first)]  # `file_for_this_rank` finds this rank's values

    engine._get_all_ckpt_names = names
    try:
        yield
    finally:
        del engine._get_all_ckpt_names


def _model(engine: Any, checkpoint: Checkpoint, saved: list[str]) -> Any:
    """The content of a model file. `saved`: the files' names; there is one for each rank (stage 3), or one for all
    ranks.
    """
    rank = torch.distributed.get_rank(group=engine.optimizer.dp_process_group)
    content = read_file(checkpoint, saved[rank % len(saved)])
    content["dp_world_size"] = engine.seq_dp_world_size
    if engine.zero_optimization_partition_weights() and content.get("frozen_param_fragments"):
        fragments = [stored_file(checkpoint, file_name)["frozen_param_fragments"] for file_name in saved]
        for name, shape in content["frozen_param_shapes"].items():
            content["frozen_param_fragments"][name] = frozen_fragment(
                checkpoint, [own[name] for own in fragments], shape, rank, engine.seq_dp_world_size
            )
    return content


def _names_of_all_ranks(checkpoint: Checkpoint, name: str) -> list[str]:
    """The names of this file on all ranks that saved it, in the order of ranks."""
    numbered = []
    for given in (str(file_name) for own in file_names(checkpoint) for file_name in own):
        if given == name or (
            _RANK.search(name) and file_of_rank(Path(given), 0).name == file_of_rank(Path(name), 0).name
        ):
            match = _RANK.search(given)
            numbered.append((int(match[2]) if match else 0, given))
    return [given for _, given in sorted(numbered)]


def _ranks_of_model(checkpoint: Checkpoint, saved: list[str]) -> int:
    """The number of data-parallel ranks that saved; 0 if no file says so."""
    count = stored_file(checkpoint, saved[0]).get("dp_world_size") if saved else None
    return count if isinstance(count, int) else 0


def _model_name(checkpoint: Checkpoint) -> str:
    names = [str(file_name) for own in file_names(checkpoint) for file_name in own]
    return next(name for name in names if section_of(name) == "model_states")
