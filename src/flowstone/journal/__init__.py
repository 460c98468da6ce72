"""A durable checkpoint of every step (`every_step`): a journal logs the gradients, and a load replays them
(LowDiff, arXiv 2509.04084).
"""
