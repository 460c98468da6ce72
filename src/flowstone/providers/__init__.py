"""Providers: how users let Flowstone save and load objects of their own types (docs/PROVIDERS.md)."""

import flowstone.state  # noqa: F401  # first: it imports the kind of this folder
