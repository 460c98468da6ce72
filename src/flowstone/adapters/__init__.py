"""Adapters: other frameworks save and load through Flowstone. The library itself does not import them."""
