"""Moves bytes between the state's memory and the store: staging memory (the arena), capture at a save, and copies into
the state at a load.
"""
