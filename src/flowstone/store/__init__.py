"""Where checkpoints are stored. A store has names and bytes, and methods to sync and rename them. This package needs
neither torch nor plans of saves.
"""
