"""The on-disk format, as docs/FORMAT.md defines it: encoding and checking, without I/O."""
