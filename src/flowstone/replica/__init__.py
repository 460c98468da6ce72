"""The process that has a training's state, too: docs/REPLICA.md. `python -m flowstone.replica DESCRIPTOR`."""
