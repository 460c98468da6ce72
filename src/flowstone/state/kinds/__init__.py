"""Kinds of values, one file each: how it is recognised, described and restored. The table is in `registry.py`."""
