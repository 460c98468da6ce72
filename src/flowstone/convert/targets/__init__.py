"""The formats that can be written: a file for each, which lays out its files before the first byte moves."""
