"""The memory agent: a small process that keeps checkpoints in this node's memory, even after the training process has
died.

The agent imports neither torch nor numpy. Stores send requests to it with store/memory/agent_client.py.
"""
