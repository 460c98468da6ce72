"""`python -m flowstone.agent.flush RUN DIRECTORY`: a run's newest checkpoint becomes durable in a directory.

The agent has a child do it.
"""

from __future__ import annotations

import socket
import sys

from flowstone.errors import FlowstoneError
from flowstone.store.local import LocalStore
from flowstone.store.node_memory import NodeMemory
from flowstone.tiers.newest import copy_newest


def main() -> int:
    """The exit status; an error is told on stderr."""
    run, directory = sys.argv[1:]
    source, target = NodeMemory(run), LocalStore(directory)
    try:
        copy_newest(source, target, f"the memory agent of {socket.gethostname()}, which flushes {source.location}")
    except (FlowstoneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        target.close()
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
