"""What the agent acts on. `notes` (for a tiny policy) and `logbook` (for real language models) are the embedded families of
tasks; any object of `protocol.Environment`'s shape will do."""

from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.logbook import LogbookEnvironment, LogbookTask, LogbookTasks
from compactionrl.environments.notes import NOTES_PROMPTS, NotesEnvironment, NotesTask, NotesTasks
from compactionrl.environments.protocol import Environment, Message, Observation, Response, TaskSet, ToolCall, Verdict

__all__ = [
    "NOTES_PROMPTS",
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
