"""Several stores (tiers) of one run: each save goes into the nearest tier, and is flushed (copied) to the others
(docs/ORDERING.md, Tiers).
"""
