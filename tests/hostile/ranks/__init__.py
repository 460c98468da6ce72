"""The hostile trainer of several ranks: real processes over gloo that get out of step, fail, die and restart.

    python -m hostile --ranks 4 --seed 7          replays one of its loops, from the folder of the tests
"""
