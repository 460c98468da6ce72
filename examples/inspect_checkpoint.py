"""List the tensors and values of a checkpoint, verify it, and read one slice of one tensor. Needs no torch.

    python examples/inspect_checkpoint.py runs/train
    python examples/inspect_checkpoint.py runs/train --step 90 --tensor model.0.weight --rows 0:4
"""

from __future__ import annotations

import argparse

import numpy as np

import flowstone as fs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("store", help="the directory that holds the checkpoints")
parser.add_argument("--step", type=int, help="default: the newest")
parser.add_argument("--tensor", help="the tensor to read")
parser.add_argument("--rows", default="0:2", help="the rows to read, FROM:TO")
arguments = parser.parse_args()

checkpoint = fs.open(arguments.store, arguments.step)
print(f"step {checkpoint.step} at {checkpoint.path}")
for name in checkpoint.tensors:
    entry = checkpoint.tensors[name]
    print(f"  {name}  {entry.dtype}  {tuple(entry.shape)}")
for name, value in checkpoint.objects.items():
    print(f"  {name} = {str(value)[:60]}")
verified = checkpoint.verify()
print(f"verified: {verified}")

if arguments.tensor:
    first, last = map(int, arguments.rows.split(":"))
    part = checkpoint.read(arguments.tensor, np.s_[first:last], framework="numpy")  # reads only these rows
    print(part)
