"""torch.distributed.checkpoint (DCP) through Flowstone: what `dcp.save` writes is an ordinary Flowstone checkpoint.

    dcp.save(state_dict, storage_writer=FlowstoneWriter("runs/gpt/step-100"))
    dcp.load(state_dict, storage_reader=FlowstoneReader("runs/gpt/step-100"))

`FlowstoneWriter` stands where `FileSystemWriter` does, `FlowstoneReader` for `FileSystemReader`, `FlowstoneStager` for
`DefaultStager`. Which rank writes what is the planner's part, and what ranks tell each other is DCP's; docs/DCP.md has
the lines to change, and what differs.
"""

from flowstone.adapters.dcp.reader import FlowstoneReader
from flowstone.adapters.dcp.stager import FlowstoneStager
from flowstone.adapters.dcp.writer import FlowstoneWriter

__all__ = ["FlowstoneReader", "FlowstoneStager", "FlowstoneWriter"]
