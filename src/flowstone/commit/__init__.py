"""Committing checkpoints: the order of publication, the catalogue of steps, retention, verification."""
