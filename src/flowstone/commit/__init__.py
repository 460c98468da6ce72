"""Commits checkpoints: the order of the writes that publish one, the catalogue of steps, retention, and verification.
"""
