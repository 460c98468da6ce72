"""Where checkpoints are stored. A store has names and bytes, syncs and renames. This package needs neither torch nor
plans.
"""
