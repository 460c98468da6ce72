"""The ranks of a job: who they are, and how they agree without ever waiting for ever."""

from flowstone.ranks.agree import Agreement, Decision
from flowstone.ranks.board import Board, Mail
from flowstone.ranks.job import only_rank
from flowstone.ranks.pulse import Pulse

__all__ = ["Agreement", "Board", "Decision", "Mail", "Pulse", "only_rank"]
