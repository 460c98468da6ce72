"""Convert checkpoints of other programs to Flowstone's, and back, in bounded memory.

Every common format stores a tensor as raw bytes at an offset in a file. So a checkpoint is read as a table of boxes
(parts of tensors) with file offsets (`source.py`, one module per format in `sources/`). A target is a table of extents
(ranges of files), planned before the first byte is written (`layout.py`, `targets/`). `copy.py` writes the target's
files one window (a range of a file) after the other. `journal.py` records which windows are durable, so that a killed
conversion can resume (docs/decisions/013).
"""
