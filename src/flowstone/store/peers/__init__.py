"""The memory of a job's nodes as one store (docs/PEERS.md)."""
