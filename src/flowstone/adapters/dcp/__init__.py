"""torch.distributed.checkpoint (DCP) through Flowstone: `dcp.save` writes ordinary Flowstone checkpoints.

    dcp.save(state_dict, storage_writer=FlowstoneWriter("runs/gpt/step-100"))
    dcp.load(state_dict, storage_reader=FlowstoneReader("runs/gpt/step-100"))

`FlowstoneWriter` replaces `FileSystemWriter`, `FlowstoneReader` replaces `FileSystemReader`, and `FlowstoneStager`
replaces `DefaultStager`. DCP's planner still decides which rank writes which tensor, and DCP still does all
communication. docs/DCP.md has the lines to change, and the differences.
"""

from flowstone.adapters.dcp.reader import FlowstoneReader
from flowstone.adapters.dcp.stager import FlowstoneStager
from flowstone.adapters.dcp.writer import FlowstoneWriter

__all__ = ["FlowstoneReader", "FlowstoneStager", "FlowstoneWriter"]
