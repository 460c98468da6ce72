"""How a Checkpointer lives with its process: threads, a lock that allows one verb at a time, signals, and the end of
the script.
"""
