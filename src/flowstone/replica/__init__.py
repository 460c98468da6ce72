"""A replica is a process that holds a second copy of a trainer's state (docs/REPLICA.md).

`python -m flowstone.replica DESCRIPTOR` starts it.
"""
