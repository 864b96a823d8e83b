"""Where commands run: behind bubblewrap, in plain processes (not isolated, and only if asked for), or anything Harbor-shaped."""

from compactionrl.sandboxes.lookup import open_sandbox
from compactionrl.sandboxes.protocol import TIMED_OUT, ExecResult, Executed, Sandbox, SandboxError

__all__ = ["TIMED_OUT", "ExecResult", "Executed", "Sandbox", "SandboxError", "open_sandbox"]
