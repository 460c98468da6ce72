"""Shared reads: chunks that several ranks of a node need are read once, by one of these ranks."""
