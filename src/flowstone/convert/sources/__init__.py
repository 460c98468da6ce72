"""The formats that can be read. Each has a module, which opens a checkpoint as a SourceCheckpoint."""
