"""The memory of a job's several nodes as one store: docs/PEERS.md."""
