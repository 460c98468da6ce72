"""A store over several paths: segments are spread over directories and buckets (docs/FORMAT.md, Paths)."""
