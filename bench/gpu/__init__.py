"""Everything about Flowstone that needs a GPU, checked and measured in one run: see tools/gpu_session.sh."""
