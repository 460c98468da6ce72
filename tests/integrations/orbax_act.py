"""Saves a tree through Orbax, of arrays on four devices of the CPU: `orbax_act.py DIRECTORY`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))


def placed(values: jax.Array, *axes: str | None) -> jax.Array:
    return jax.device_put(values, NamedSharding(MESH, PartitionSpec(*axes)))


def tree() -> dict[str, object]:
    return {
        "params": {
            "dense": {
                "kernel": placed(jnp.arange(600.0).reshape(20, 30), "a", "b"),
                "bias": placed(jnp.arange(30, dtype=jnp.bfloat16), "b"),
            },
            "layers": [placed(jnp.full((4, 6), float(n)), "a", None) for n in range(3)],
        },
        "opt_state": ({"mu": np.arange(5, dtype=np.int8)}, None, {}),
        "step": 7, "rate": 0.5, "note": "warm",
    }


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name, options in {
        "ocdbt": {}, "plain": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}, "raw": {"use_compression": False},
    }.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(root / name, args=ocp.args.PyTreeSave(tree()))
    with ocp.CheckpointManager(root / "managed") as manager:
        manager.save(3, args=ocp.args.Composite(
            state=ocp.args.StandardSave({"params": tree()["params"]}), extra=ocp.args.JsonSave({"a": 1}),
        ))
        manager.wait_until_finished()
