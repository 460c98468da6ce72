"""`flowstone demo`: a real training run, killed again and again, that ends bit-identical to an undisturbed one.

corpus.py, gpt.py, train.py   the training, as a user would write it; start reading at train.py
sharded.py                    the same on several ranks, by FSDP2
child.py, messages.py         the training as a process that reports what it does; rank.py: one rank of it
child_process.py              the supervisor's handle of such a process
kill_schedule.py              when to kill it
kill_loop.py, run_log.py      act two: kill, check what was left, start again
rank_processes.py, across.py  act four: the ranks of a job; killed, and continued by fewer
every_step.py                 act five: a checkpoint of every step, killed at random instants
fingerprint.py, compare.py    two independent checks that two states are equal
curves.py                     how far loss curves may differ through the order of summation alone
claims.py, claims_of_ranks.py the claims of each act, and how they are judged
acts.py, screen.py            the order of the five acts; what is shown

It uses only Flowstone's public interface.
"""
