"""How all other layers describe the tensors of a state: boxes, dtypes, pieces, chunks. Independent of files, ranks and
torch.
"""
