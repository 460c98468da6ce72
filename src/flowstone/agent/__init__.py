"""The memory agent: a small process that keeps the checkpoints in this node's memory when the trainer has died.

It imports neither torch nor numpy. Stores talk to it by store/agent_client.py.
"""
