"""The ranks of a job: how many there are, and how they agree, with a limit on every wait."""

from flowstone.ranks.agreement import Agreement, AgreementResult, MessageEncoding, Timeouts
from flowstone.ranks.exchange import Decision
from flowstone.ranks.failure import error_text
from flowstone.ranks.group import Job, RankGroup, error_for_others, rank_and_size, this_job
from flowstone.ranks.kv_store import KeyValueStore, Mailbox

__all__ = [
    "AgreementResult",
    "Agreement",
    "Decision",
    "MessageEncoding",
    "Job",
    "KeyValueStore",
    "Mailbox",
    "RankGroup",
    "Timeouts",
    "error_for_others",
    "error_text",
    "rank_and_size",
    "this_job",
]
