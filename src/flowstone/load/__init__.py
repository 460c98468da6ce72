"""Loads of one Checkpointer. conductor.py has their phases in order."""
