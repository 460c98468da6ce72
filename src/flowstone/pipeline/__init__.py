"""The order of a save and of a load."""
