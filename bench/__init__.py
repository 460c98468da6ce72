"""The benchmark: Flowstone, its rivals and the device itself, on the same state in the same run."""
