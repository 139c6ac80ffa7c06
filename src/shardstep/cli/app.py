"""The commands of `shardstep`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from shardstep import __version__
from shardstep.cli.console import FAILED, INTERRUPTED, MISUSED, complete_from, exit_with_error
from shardstep.cli.convert_command import convert_path
from shardstep.cli.demo.exchange import Exchange, Result
from shardstep.cli.demo.launch import WorkerError, run_workers
from shardstep.cli.demo.report import format_count, make_table, show_progress, summarise
from shardstep.cli.demo.settings import OPTIMIZERS, SIZES, Settings, find_problems
from shardstep.cli.inspect_command import inspect_path

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"shardstep {__version__}")
        raise typer.Exit


@app.callback()
def shardstep(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One copy of the optimizer state in a data-parallel PyTorch job, instead of one per rank.

    See it at work on this machine, in a minute or two:

        shardstep demo

    Show what is in a checkpoint, and convert it for other programs:

    \b
        shardstep inspect run
        shardstep convert run model.pt --to torch
    """


@app.command(short_help="Train a small GPT without and with shardstep, and compare.")
def demo(
    ranks: Annotated[int, typer.Option(help="Processes to train on, all on this machine.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps of each of the three runs.")] = 120,
    model: Annotated[
        str, typer.Option(metavar="|".join(SIZES), autocompletion=complete_from(SIZES), help="The size of the GPT.")
    ] = "small",
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="|".join(OPTIMIZERS),
            autocompletion=complete_from(OPTIMIZERS),
            help="AdamW, or Muon for the matrices and AdamW for the rest.",
        ),
    ] = "adamw",
    out: Annotated[Path, typer.Option(help="The folder that gets the pictures; made if missing.")] = Path(
        "shardstep-demo"
    ),
) -> None:
    """Train a small GPT in three ways and compare: DDP + AdamW, DDP + the drop-in optimizer, and shard().

    All start from the same weights, train on the same text, and take turns. At the end a table shows whether the
    parameters are equal, how much optimizer state and gradients each rank keeps, how many bytes it sends and how long a
    step takes; one picture shows the memory of every rank, another what a step costs. Runs on GPUs if there are any,
    else on the CPU: a minute or two on two cores.

    \b
        shardstep demo
        shardstep demo --model tiny --steps 50 --ranks 4 --out four-ranks
        shardstep demo --optimizer muon
    """
    console = Console(highlight=False, markup=False)  # the name of a folder may look like markup: [bold]
    settings = Settings(ranks=ranks, steps=steps, model=model, optimizer=optimizer, out=out)
    problems = find_problems(settings)
    if problems:
        exit_with_error("demo", MISUSED, *problems)
    try:
        result = _train(settings, console)
    except WorkerError as failure:
        exit_with_error("demo", FAILED, str(failure))
    except KeyboardInterrupt:
        exit_with_error("demo", INTERRUPTED, "stopped; the workers have ended.")
    _report(result, settings.out, console)


def _train(settings: Settings, console: Console) -> Result:
    steps, ranks = format_count(settings.steps, "step"), format_count(settings.ranks, "rank")
    console.print(f"Training the same GPT in three ways, {steps} each, on {ranks} of this machine.")
    with (
        TemporaryDirectory(prefix="shardstep-demo-") as folder,
        show_progress(OPTIMIZERS[settings.optimizer], settings.steps, console) as on_tick,
    ):
        return run_workers(settings, Exchange(Path(folder)), on_tick)


def _report(result: Result, out: Path, console: Console) -> None:
    # Imported here, so that `--help` does not wait for matplotlib.
    from shardstep.cli.demo.picture import write_pictures

    out.mkdir(parents=True, exist_ok=True)
    memory, step = write_pictures(result, out)
    console.print(make_table(result))
    for sentence in (*summarise(result), f"As pictures, memory per rank: {memory}", f"and what a step costs: {step}"):
        console.print(sentence, soft_wrap=True)


app.command("inspect", short_help="Show what is in a checkpoint, and whether it is complete.")(inspect_path)
app.command("convert", short_help="Convert a checkpoint to or from another program's format.")(convert_path)
