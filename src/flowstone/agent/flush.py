"""`python -m flowstone.agent.flush RUN DIRECTORY`: make a run's newest checkpoint durable in a directory.

The agent runs this as a child process. The child prints a FlushResult: which checkpoint DIRECTORY has now.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.store.local import LocalStore
from flowstone.store.memory.node_memory import NodeMemory
from flowstone.tiered.newest import copy_newest


def main() -> int:
    """Run the flush. Returns the exit status; prints errors to stderr."""
    run, directory = sys.argv[1:]
    source, target = NodeMemory(run), LocalStore(directory)
    holder = f"the memory agent of {socket.gethostname()}, which flushes {source.location}"
    try:
        copied = copy_newest(source, target, holder)
    except (FlowstoneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        target.close()
        source.close()
    if copied is None:
        print(f"{source.location} has no checkpoint to flush", file=sys.stderr)
        return 1
    os.write(sys.stdout.fileno(), msgspec.json.encode(copied))
    return 0


if __name__ == "__main__":
    sys.exit(main())
