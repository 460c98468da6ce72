"""Kinds: what a value of a state is to us, as far as its type tells."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, deque

import numpy as np
import torch

from flowstone.state.flat import Flat
from flowstone.state.records import PerRank, Shard
from flowstone.state.tensors import DENSE_TYPES


class Kind(enum.Enum):
    """Decides which provider describes a value and restores it."""

    TENSOR = enum.auto()
    ARRAY = enum.auto()
    SHARD = enum.auto()
    FLAT = enum.auto()
    MODULE = enum.auto()
    OPTIMIZER = enum.auto()
    GENERATOR = enum.auto()
    STATEFUL = enum.auto()  # anything else with state_dict and load_state_dict
    CONTAINER = enum.auto()  # may hold any of these
    PROVIDED = enum.auto()  # a Provider has the word: a registered one, or that of split tensors
    PER_RANK = enum.auto()
    PLAIN = enum.auto()  # a value of its own


class ProcessGenerators:
    """The generators that belong to the process: python's, numpy's, torch's on the CPU and on every GPU."""

    __slots__ = ()


CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range})
GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    ProcessGenerators,
)
KINDS: tuple[tuple[type | tuple[type, ...], Kind], ...] = (
    (torch.Tensor, Kind.TENSOR),
    (np.ndarray, Kind.ARRAY),
    (torch.nn.Module, Kind.MODULE),
    (torch.optim.Optimizer, Kind.OPTIMIZER),
    (Shard, Kind.SHARD),
    (Flat, Kind.FLAT),
    (PerRank, Kind.PER_RANK),
    (GENERATORS, Kind.GENERATOR),
)
BUILT_IN: frozenset[type] = frozenset({
    *CONTAINERS, *PLAIN, *DENSE_TYPES, *GENERATORS, np.ndarray, torch.nn.Module, torch.optim.Optimizer, Shard, Flat,
    PerRank, set, frozenset, deque, Counter, slice, object, type,
})
"""Types that no other provider may take over: checkpoints say what they are in words of their own."""
STATEFUL = ("state_dict", "load_state_dict")
