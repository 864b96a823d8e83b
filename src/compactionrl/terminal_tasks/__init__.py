"""Terminal tasks of our own in Harbor's format, made for long horizons; see docs/terminal-tasks.md."""

from compactionrl.terminal_tasks.catalogue import KINDS, instances, make_task, write_tasks
from compactionrl.terminal_tasks.task import GRADES, Draft, TerminalTask

__all__ = ["GRADES", "KINDS", "Draft", "TerminalTask", "instances", "make_task", "write_tasks"]
