"""`python -m flowstone.agent.flush RUN DIRECTORY`: a run's newest checkpoint becomes durable in a directory.

The agent runs it as a child process, and reads from its stdout which checkpoint is durable there (Copied).
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.store.local import LocalStore
from flowstone.store.node_memory import NodeMemory
from flowstone.tiers.newest import copy_newest


def main() -> int:
    """The exit status; an error is told on stderr."""
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
