"""The ranks of a job: their number, and how they agree without an unbounded wait."""

from flowstone.ranks.agreement import Agreed, Agreement, Encoding, Timeouts
from flowstone.ranks.failure import name_of
from flowstone.ranks.group import RankGroup, error_for_others
from flowstone.ranks.job import Job, rank_and_size, this_job
from flowstone.ranks.kv_store import KeyValueStore, Mailbox
from flowstone.ranks.wire import Decision

__all__ = [
    "Agreed",
    "Agreement",
    "Decision",
    "Encoding",
    "Job",
    "KeyValueStore",
    "Mailbox",
    "RankGroup",
    "Timeouts",
    "error_for_others",
    "name_of",
    "rank_and_size",
    "this_job",
]
