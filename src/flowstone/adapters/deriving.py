"""How an object of a framework gets methods of ours in the place of its own."""

from __future__ import annotations


def derive(host: object, mixin: type, framework: type) -> None:
    """Make the class of `host` one of the same name with the methods of `mixin` in the place of the framework's, once.

    A user's subclass of `framework` keeps its own methods: its `super()` calls those of `mixin`, and theirs the
    framework's.
    """
    kind = type(host)
    if issubclass(kind, mixin):
        return
    replaced = type(framework.__name__, (mixin, framework), {"__module__": framework.__module__})
    bases = (replaced,) if kind is framework else (kind, replaced)
    host.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
