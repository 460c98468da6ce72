"""What lies on disk, as docs/FORMAT.md defines it: pure encoding and checking, no I/O."""
