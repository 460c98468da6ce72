"""Conversion: checkpoints of other programs become ours, and ours theirs, in a bounded window of memory.

Every format of the field stores a tensor as raw bytes at a place in a file. So a checkpoint is a table of boxes with
places (`source.py`, a file for each format in `sources/`), and a target is a table of extents that is known before the
first byte moves (`layout.py`, `targets/`). `copy.py` goes through the target's files window by window; `journal.py`
says which windows are durable, so that a conversion that was killed goes on (docs/decisions/013).
"""
