"""What the agent acts on. `notes` is the embedded family of tasks; any object of `protocol.Environment`'s shape will do."""

from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.notes import NOTES_PROMPTS, NotesEnvironment, NotesTask, NotesTasks
from compactionrl.environments.protocol import Environment, Message, Observation, Response, TaskSet, ToolCall, Verdict

__all__ = [
    "NOTES_PROMPTS",
    "Demonstrator",
    "Environment",
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
