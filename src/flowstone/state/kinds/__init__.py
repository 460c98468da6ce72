"""Kinds of values, such as arrays and containers. Each file says how values of a kind are recognised, saved and
restored. The table of all kinds is in `registry.py`.
"""
