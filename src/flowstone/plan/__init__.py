"""Who writes or reads what, and where: pure functions without torch, clock or I/O."""
