"""How the ranks of a job agree on one save."""
