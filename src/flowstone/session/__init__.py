"""Objects that both the saves and the loads of one Checkpointer use."""
