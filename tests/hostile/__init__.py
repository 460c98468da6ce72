"""A hostile trainer: training loops drawn from a seed, that do to the state whatever loops do.

    python -m hostile --seed 7          replays one of them, from the folder of the tests
"""
