"""What the agent acts on. The embedded families of tasks are `notes` (for a tiny policy), `logbook` (for real language models)
and `deliveries` (for the smallest of them); any object of `protocol.Environment`'s shape will do."""

from compactionrl.environments.deliveries import DeliveriesEnvironment, DeliveriesTasks
from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.logbook import LogbookEnvironment, LogbookTask, LogbookTasks
from compactionrl.environments.notes import NOTES_PROMPTS, NotesEnvironment, NotesTask, NotesTasks
from compactionrl.environments.protocol import Environment, Message, Observation, Response, TaskSet, ToolCall, Verdict

__all__ = [
    "NOTES_PROMPTS",
    "DeliveriesEnvironment",
    "DeliveriesTasks",
    "Demonstrator",
    "Environment",
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
    "ToolCall",
    "Verdict",
]
