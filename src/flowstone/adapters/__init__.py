"""Adapters: Flowstone behind the interfaces of others, thin. Nothing of the library imports them."""
