"""Between live memory and the store: the arena, capture on the way out, scatter on the way in."""
