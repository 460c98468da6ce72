"""Saves of one Checkpointer. conductor.py lists their phases in order."""
