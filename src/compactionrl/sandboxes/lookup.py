"""Sandboxes by name: the two that are here, or `module:Class` of anything that has their shape."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from compactionrl.sandboxes.protocol import Sandbox

NAMES = {
    "bwrap": "compactionrl.sandboxes.bwrap:BwrapSandbox",
    "process": "compactionrl.sandboxes.process:ProcessSandbox",
}


def open_sandbox(name: str, **options: Any) -> Sandbox:
    """A new sandbox, not started yet. `options` are the arguments of its class.

    Raises `ValueError` for a name that leads to nothing, and whatever the class says of options that it does not take.
    """
    module, _, attribute = NAMES.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"no sandbox is called {name!r}: there are {', '.join(NAMES)}, or module:Class of your own")
    try:
        found = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"the sandbox {name!r} cannot be imported: {error}") from error
    sandbox: Sandbox = found(**options)
    return sandbox
