"""The one table of a state's content: boxes, dtypes, pieces, chunks. Independent of files, ranks and torch."""
