"""Which rank logs which gradients: each once, balanced by bytes; and the sum that shows which ranks had one."""

from __future__ import annotations

import random

import numpy as np

from flowstone.journal.gradient_owners import ParameterOwners, agreement_term, assign_owners


def shared(held: list[list[int]], lengths: dict[int, int]) -> list[ParameterOwners]:
    keys = [np.array(own, np.uint64) for own in held]
    return assign_owners(keys, [np.array([lengths[key] for key in own], np.uint64) for own in held])


def test_each_parameter_is_logged_by_one_of_the_ranks_that_hold_it_and_they_log_about_as_much() -> None:
    chance = random.Random(1)
    for _ in range(30):
        ranks = chance.randrange(1, 6)
        lengths = {chance.randrange(1 << 64): chance.randrange(100) for _ in range(40)}
        holders = {key: chance.sample(range(ranks), chance.randrange(1, ranks + 1)) for key in lengths}
        held = [[key for key in lengths if rank in holders[key]] for rank in range(ranks)]
        shared_bytes = shared(held, lengths)
        logged: dict[int, set[int]] = {}
        for own, owners in zip(held, shared_bytes, strict=True):
            for key, rank, count in zip(own, owners.rank.tolist(), owners.holders.tolist(), strict=True):
                logged.setdefault(key, set()).add(rank)
                assert count == len(holders[key])
        assert all(len(ranks) == 1 and ranks <= {*holders[key]} for key, ranks in logged.items())
    (first, second) = shared([[5, 6, 7, 8]] * 2, {5: 9, 6: 9, 7: 9, 8: 9})
    assert first.rank.tolist() == second.rank.tolist()
    assert sorted(first.rank.tolist()) == [0, 0, 1, 1]


def test_claims_sum_to_zero_exactly_if_all_holders_had_the_same_gradients() -> None:
    held = [[11, 22, 33], [22, 33, 44], [33, 11]]
    keys = [np.array(own, np.uint64) * np.uint64(0x9E3779B97F4A7C15) for own in held]
    actual = assign_owners(keys, [np.ones(len(own), np.uint64) for own in held])

    def total(acts: list[list[list[int]]]) -> int:
        return sum(
            agreement_term(keys[rank], actual[rank], rank, [[held[rank].index(key) for key in act] for act in own])
            for rank, own in enumerate(acts)
        ) % (1 << 64)

    assert total([[[11, 22, 33]], [[22, 33, 44]], [[33, 11]]]) == 0
    assert total([[[22]], [[22, 44]], [[]]]) == 0
    assert total([[[22], [33]], [[22], [33]], [[], [33]]]) == 0
    assert total([[[11, 22, 33]], [[33, 44]], [[33, 11]]]), "one rank lacks a gradient"
    assert total([[[22], [33]], [[33], [22]], [[], [33]]]), "in other acts"
