"""Plans of large jobs, in one process."""
