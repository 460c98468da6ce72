"""Plans: which rank writes or reads which bytes, and where in the files. Pure functions without torch, clock or I/O."""
