"""The on-disk format that docs/FORMAT.md defines: encodes and checks bytes, and reads or writes no files."""
