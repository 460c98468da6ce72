"""Layout rules: a load of tensors that were split, fused, stacked or transposed in the checkpoint."""
