"""The kinds of values that are torch's (tensors, modules, optimizers), in the order of the table in `registry.py`."""

from flowstone.torch.kinds.module import ModuleKind
from flowstone.torch.kinds.optimizer import OptimizerKind
from flowstone.torch.kinds.tensor import DTensorKind, FlatKind, TensorKind, TensorSubclassKind

TENSOR_KINDS = (TensorSubclassKind(), DTensorKind(), TensorKind())
OBJECT_KINDS = (ModuleKind(), OptimizerKind(), FlatKind())
