"""`flowstone demo`: a training run that is killed repeatedly, and whose result is bit-identical to that of an
undisturbed run.

corpus.py, gpt.py, train.py   the training, as a user would write it; start reading at train.py
sharded.py                    the same training on several ranks, by FSDP2
child.py, messages.py         the training as a process that reports its progress; rank.py: one rank of it
child_process.py              starts such a process, reads its messages, and kills it
kill_schedule.py              when to kill it
kill_loop.py, run_log.py      act two: kill, check the store, start again
rank_processes.py, across.py  act four: the ranks of a job are killed; fewer ranks continue
every_step.py                 act five: a checkpoint of every step, killed at random instants
fingerprint.py, compare.py    two independent checks that two states are equal
curves.py                     how far loss curves may differ by rounding
claims.py, claims_of_ranks.py the claims of each act, and their checks
acts.py, screen.py            the order of the five acts; their output

It uses only Flowstone's public interface.
"""
