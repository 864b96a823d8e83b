"""Fenced commands: exactly one, or the policy is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.environments.commands import NoCommand, fenced_command


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls -l\n```", "ls -l"),
        ("First I look.\n\n```sh\nls\n```\nThen I think.", "ls"),
        ("```Shell\nls\npwd\n```", "ls\npwd"),
        ("```\nls\n```", "ls"),
        ("```bash title=x\n  ls\n```  ", "  ls"),
        ("   ```bash\n   ls\n   ```", "   ls"),
        ("```python\nprint(1)\n```\n```bash\nls\n```", "ls"),
        ("```\nsome output\n```\n```bash\nls\n```", "ls"),
        ("````bash\ncat > a.md <<E\n```\nx\n```\nE\n````", "cat > a.md <<E\n```\nx\n```\nE"),
        ("```bash\necho '``` x'\n```", "echo '``` x'"),
        ("Use `ls`.\n```bash\nls\n```", "ls"),
        ("```bash\r\nls\r\n```", "ls"),
    ],
)
def test_the_one_command_is_found(text: str, command: str) -> None:
    assert fenced_command(text) == command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "No command was found"),
        ("ls", "No command was found"),
        ("```bash ls```", "No command was found"),
        ("```python\nprint(1)\n```", "No command was found"),
        ("```bash\nls\n```\n```sh\npwd\n```", "2 commands were found, and none was run"),
        ("```\nls\n```\n```\npwd\n```", "2 commands were found, and none was run"),
        ("```bash\n\n```", "The command is empty"),
        ("```bash\nrm -r build", "A block is not closed, and nothing was run"),
        ("```bash\nls\n```\n```python\nx", "A block is not closed, and nothing was run"),
    ],
)
def test_else_the_policy_is_told_what_to_write(text: str, message: str) -> None:
    with pytest.raises(NoCommand, match=rf"^{message}.*exactly one block"):
        fenced_command(text)


@given(st.lists(st.text(st.characters(exclude_characters="`\r\n")), min_size=1))
def test_any_command_comes_back_as_it_was_written(lines: list[str]) -> None:
    command = "\n".join(lines)
    if command.strip():
        assert fenced_command(f"Now:\n```bash\n{command}\n```\nDone.") == command
