"""The one table of what a state holds: boxes, dtypes, pieces. Knows nothing of files, ranks or torch."""
