"""Replace methods of a framework's object by methods of Flowstone."""

from __future__ import annotations

from typing import Any


def override_methods(host: Any, mixin: type, framework: type, checkpoints: object) -> None:
    """Replace the class of `host` by a subclass with the same name, in which `mixin` overrides the framework's methods.
    A second call only replaces `checkpoints`.

    checkpoints  an object that the methods of `mixin` use, as `self._flowstone`

    A user's subclass of `framework` keeps its own methods: their `super()` calls `mixin`, whose `super()` calls the
    framework.
    """
    host._flowstone = checkpoints
    kind = type(host)
    if issubclass(kind, mixin):
        return
    replaced = type(framework.__name__, (mixin, framework), {"__module__": framework.__module__})
    bases = (replaced,) if kind is framework else (kind, replaced)
    host.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
