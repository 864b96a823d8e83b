"""The command line. Every command reads one configuration; whatever is heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from compactionrl import __version__
from compactionrl.config import Config, ConfigError, load_config

OVERRIDE = re.compile(r"--([A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
EXTRAS = {"torch", "transformers", "safetensors", "pyarrow", "matplotlib", "tensorboard"}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every key of the configuration is an option of every command: --train.steps 10 --context.budget=4096",
)
ConfigFile = Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", dir_okay=False, help="Defaults if left out.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Errors that the user can mend end with one message on stderr and exit code 2."""
    # Before torch is imported: threads that spin for a core they do not get cost up to ten times the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        rest, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
        app(args=rest, obj=overrides, prog_name="compactionrl")
    except ConfigError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        fail(f"{error.name} is not installed; this command needs: pip install 'compactionrl[train]'")


def fail(message: str) -> None:
    print(f"compactionrl: {message}", file=sys.stderr)
    raise SystemExit(2)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take `--section.key value` and `--section.key=value` out of the arguments, wherever they stand; the last one counts."""
    from compactionrl.config_toml import parse_value

    rest: list[str] = []
    overrides: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        match = OVERRIDE.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        key, text = match[1], match[2]
        if text is None:
            text = next(remaining, None)
        if text is None or (match[2] is None and text.startswith("--")):
            raise ConfigError(f"--{key} needs a value; one that begins with -- is written --{key}=...")
        overrides[key] = parse_value(key, text)
    return rest, overrides


def read(context: typer.Context, path: Path | None) -> Config:
    return load_config(path, context.obj)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Reinforcement learning for agents that summarise their own context."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def config(context: typer.Context, path: ConfigFile = None) -> None:
    """Print the resolved configuration as TOML: every key, its meaning, its value."""
    from compactionrl.config_toml import dump

    typer.echo(dump(read(context, path)), nl=False)


if __name__ == "__main__":
    main()
