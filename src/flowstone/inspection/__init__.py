"""What is in a checkpoint, without loading it: its composition, a load explained."""
