"""`flowstone demo`: a real training run, killed again and again, that ends bit-identical to one left alone.

corpus.py, gpt.py, train.py   the training, as a user would write it: begin with train.py
child.py, messages.py         the training as a process that tells what it does
life.py, strikes.py           the supervisor's hold on such a process; when to kill it
storm.py                      act two: kill, look at what was left, start again
fingerprint.py, compare.py    two independent ways to say that two states are the same
acts.py, screen.py            the order of the three acts; what is shown

It uses Flowstone by its public face alone.
"""
