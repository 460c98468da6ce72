"""Rules: differences that a load allows, changes of tensors' layout, and quantization."""
