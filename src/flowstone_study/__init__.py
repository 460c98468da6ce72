"""The I/O study: measure how layout, coalescing, buffering, interface and memory influence the rate of a mount.

The study repeats measurements of Gossman et al. ("Understanding LLM Checkpoint/Restore I/O Strategies and Patterns",
arXiv 2512.24511) on the user's file system. It makes plain writes and reads, without a checkpoint format. docs/STUDY.md
explains the results.

    prepare (probe, planning) -> campaign (-> processes -> worker -> _native) -> summary -> terminal, export, page

    tune -> search, trials (saves and restores of a real store) -> store.tuning

No save or load uses this package, and it does not need torch.
"""
