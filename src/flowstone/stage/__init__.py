"""Between live memory and the store: the arena, capture at a save, scatter at a load."""
