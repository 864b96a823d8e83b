"""What the agent acts on. The embedded families of tasks are `notes` (for a tiny policy), `logbook` (for real language models)
and `deliveries` (for the smallest of them); terminals, Harbor tasks and text games are here, too. Any object of
`protocol.Environment`'s shape will do."""

from compactionrl.environments.deliveries import DeliveriesEnvironment, DeliveriesTasks
from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.harbor_task import HarborTask
from compactionrl.environments.harbor_tasks import HarborTasks
from compactionrl.environments.logbook import LogbookEnvironment, LogbookTask, LogbookTasks
from compactionrl.environments.notes import NOTES_PROMPTS, NotesEnvironment, NotesTask, NotesTasks
from compactionrl.environments.protocol import Environment, Message, Observation, Response, TaskSet, ToolCall, Verdict
from compactionrl.environments.terminal import TerminalEnvironment, TerminalOptions

__all__ = [
    "NOTES_PROMPTS",
    "DeliveriesEnvironment",
    "DeliveriesTasks",
    "Demonstrator",
    "Environment",
    "HarborTask",
    "HarborTasks",
    "LogbookEnvironment",
    "LogbookTask",
    "LogbookTasks",
    "Message",
    "NotesEnvironment",
    "NotesTask",
    "NotesTasks",
    "Observation",
    "Response",
    "TaskSet",
    "TerminalEnvironment",
    "TerminalOptions",
    "ToolCall",
    "Verdict",
]
