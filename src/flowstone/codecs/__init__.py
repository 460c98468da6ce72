"""Ways to write fewer bytes (`EngineOptions.compress`): encode chunks; omit tensors that can be derived from others."""
