"""The ranks of a job: who they are, and how they agree without ever waiting for ever."""

from flowstone.ranks.agree import Agreed, Agreement
from flowstone.ranks.board import Board, Mail
from flowstone.ranks.exchange import Decision
from flowstone.ranks.failure import name_of
from flowstone.ranks.job import Job, rank_and_size, this_job
from flowstone.ranks.pulse import Activity, Pulse

__all__ = [
    "Activity", "Agreed", "Agreement", "Board", "Decision", "Job", "Mail", "Pulse", "name_of", "rank_and_size",
    "this_job",
]
