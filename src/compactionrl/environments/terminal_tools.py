"""How a policy drives a terminal: the tools, the fenced form for models without tools, and what both are told."""

from __future__ import annotations

from typing import Any, Literal

Form = Literal["native", "fenced"]
COMPLETE = "task_complete"
"""The tool, and in the fenced form the command, that ends the work."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "execute_commands",
            "description": "Run shell commands one after the other and see what they print.",
            "parameters": {
                "type": "object",
                "properties": {
                    "analysis": {"type": "string", "description": "What the terminal shows and what is still missing."},
                    "plan": {"type": "string", "description": "What these commands are for."},
                    "commands": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "command": {"type": "string", "description": "Text for bash, of one or more lines."},
                                "duration": {"type": "number", "description": "Seconds that it may take at most."},
                            },
                            "required": ["command"],
                        },
                    },
                },
                "required": ["commands"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": COMPLETE,
            "description": "End the work. The first call shows what to check, the next one ends it.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

SYSTEM = """\
You work alone in a Linux terminal; nobody can answer a question. {how}

- All commands run in the same bash: its directory, variables and functions stay from one to the next.
- There is no keyboard. Programs that ask, page or draw (editors, less, top) get no input: use their plain forms.
- A command ends when it is done, or is stopped after {seconds} seconds{longer}. What takes longer belongs in the \
background, with its output in a file.
- You see the beginning and the end of what is printed, {output_bytes} bytes together: look at large files in parts.
- Change nothing that the task does not ask for. Look at your result before you end the work."""

EXAMPLE = "Answer in this form:\n\n```bash\nls -la\n```"
HOW = {
    "native": "Run commands with execute_commands. When the task is done, call task_complete.",
    "fenced": "Each of your turns holds one command, and you are shown what it prints. When the task is done, the command is "
    f"task_complete. {EXAMPLE}",
}
LONGER = {"native": "; its duration may say less, or up to {most_seconds:g}", "fenced": ""}
NO_CALL = "Nothing was run: call execute_commands, or task_complete when the task is done."
CHECKLIST = """\
Before the work ends, compare it with the task, which was:

{instruction}

- Is every file that it asks for there, under the very name and in the very form?
- Have you looked at the result, or run it, and not only written it?
- Are all values the ones found here, none guessed or left over from a trial?
- Is nothing changed or left behind that the task does not ask for?

{how} If something is missing, go on working."""
AGAIN = {
    "native": "If all of it is done, call task_complete once more.",
    "fenced": "If all of it is done, give the command task_complete once more.",
}
STOPPED = (
    "[stopped after {seconds:.1f} seconds. What it printed so far is above; what it was still doing is gone. Longer work "
    "belongs in the background: COMMAND > FILE 2>&1 &]"
)


def system_prompt(form: Form, *, output_bytes: int, seconds: float, most_seconds: float) -> str:
    longer = LONGER[form].format(most_seconds=most_seconds)
    return SYSTEM.format(how=HOW[form], seconds=f"{seconds:g}", longer=longer, output_bytes=output_bytes)


def checklist(form: Form, instruction: str) -> str:
    return CHECKLIST.format(instruction=instruction.strip(), how=AGAIN[form])
