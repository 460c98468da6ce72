"""The user's line in a heartbeat: finding it never waits for objects that the garbage collector frees."""

from __future__ import annotations

import subprocess
import sys

LOOKS = """
import gc, threading
from flowstone.ranks.heartbeat import user_code_line

class Held:
    pass

def look():
    for _ in range(2000):
        held = Held()
        held.own, held.local = held, threading.local()
        held.local.value = 1
        del held
        user_code_line()

gc.set_threshold(1, 1, 1)
look()
other = threading.Thread(target=look)
other.start()
other.join()
print(gc.isenabled(), user_code_line().endswith("in <module>"))
"""


def test_a_collection_while_it_looks_stands_still_for_no_lock() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
