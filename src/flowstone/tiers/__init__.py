"""Several stores of one run: what the nearest has is flushed to the farther ones (docs/ORDERING.md, Tiers)."""
