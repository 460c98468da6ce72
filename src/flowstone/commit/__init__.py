"""What makes bytes a checkpoint: the order of publication, the catalogue, verification."""
