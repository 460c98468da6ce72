"""The hostile trainer of several ranks: real processes over gloo, that are out of step, fail, die and come back.

    python -m hostile --ranks 4 --seed 7          replays one of its loops, from the folder of the tests
"""
