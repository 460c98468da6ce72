"""Plans: which rank writes or reads which bytes, and where. Pure functions without torch, clock or I/O."""
