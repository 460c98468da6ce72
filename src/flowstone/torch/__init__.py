"""All code that calls torch for a save or a load: finding the memory of tensors, modules, optimizers, sharding, memory
and streams of devices.
"""

import flowstone.state  # noqa: F401  # first: it imports modules of this folder
