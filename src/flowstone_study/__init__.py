"""The I/O study: how layout, coalescing, buffering, interface and memory decide the rate of a mount.

It measures, on the user's own file system, what Gossman et al. measured on theirs ("Understanding LLM
Checkpoint/Restore I/O Strategies and Patterns", arXiv 2512.24511): plain writes and reads, without a checkpoint format.
docs/STUDY.md says how to read the results.

    prepare (probe, planning) -> campaign (-> processes -> worker -> _native) -> summary -> terminal, export, page

    tune -> search, trials (saves and restores of a real store) -> store.tuning

No save or load uses this package, and it does not need torch.
"""
