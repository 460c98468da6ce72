"""`flowstone demo`: a real training run, killed again and again, that ends bit-identical to one left alone.

corpus.py, gpt.py, train.py   the training, as a user would write it: begin with train.py
sharded.py                    the same on several ranks, by FSDP2
child.py, messages.py         the training as a process that tells what it does; rank.py: one rank of it
child_process.py              the supervisor's handle of such a process
kill_schedule.py              when to kill it
kill_loop.py, run_log.py       act two: kill, look at what was left, start again
rank_processes.py, across.py  act four: the ranks of a job; killed, and continued by fewer
fingerprint.py, compare.py    two independent ways to say that two states are the same
curves.py                     how far loss curves may lie apart by the order of sums alone
claims.py, claims_of_ranks.py what is claimed of each act, and how it is judged
acts.py, screen.py            the order of the four acts; what is shown

It uses Flowstone by its public face alone.
"""
