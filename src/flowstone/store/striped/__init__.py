"""A store over several paths: segments are distributed over directories and buckets (docs/FORMAT.md, Paths)."""
