"""The formats that can be read: a file for each, which makes a Source of what it finds."""
