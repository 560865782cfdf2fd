"""The command line. Nothing heavy is imported before a command runs."""

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from profiler import __version__
from profiler.cli import compare, explain, measure, predict
from profiler.cli.measure import started_by_torchrun
from profiler.cli.options import EXIT_INTERRUPTED, EXIT_REQUEST
from profiler.cli.removed import removed
from profiler.errors import RequestError, RoofscopeError, describe_error, first_line, near_misses
from profiler.units import visible

_DEBUG = "--debug"
_SUMMARY = 66
"""Columns of a summary in the list of commands, which is 80 wide."""

GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Measure": (measure.run, measure.batch_test, measure.ceilings, measure.doctor),
    "Explain": (explain.why, explain.explain, explain.judge, explain.report, explain.plot, explain.export),
    "Compare": (compare.compare, compare.gate, compare.place),
    "Predict": (predict.count, predict.explore, predict.forecast, predict.rent),
    "List": (measure.gpus, measure.models),
}
"""The commands of each heading of `roofscope --help`; a command has the name of its function."""


class GroupedCommands(TyperGroup):
    """The commands in groups, in place of one long list."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that the arguments name. Raises RequestError for one that was removed or never existed."""
        name = args[0]
        if not (ctx.resilient_parsing or name in self.commands):  # a shell's completion is resilient
            unknown = f"there is no command {name!r}.{near_misses(name, self.commands)} See `roofscope --help`."
            raise RequestError(removed(name) or unknown)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, functions in GROUPS.items():
            names = [name_of(function) for function in functions]
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(_SUMMARY)) for name in names])


def name_of(command: Callable[..., Any]) -> str:
    return command.__name__.replace("_", "-")


app = typer.Typer(
    name="roofscope",
    cls=GroupedCommands,
    invoke_without_command=True,
    help="Measure how fast a model runs on this device, what limits it, and what would make it faster.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_given: bool) -> None:
    if is_given:
        print(f"roofscope {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show tracebacks; allowed anywhere on the line.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


for _command in (command for commands in GROUPS.values() for command in commands):
    app.command(name_of(_command), **(explain.OF_WHY if _command is explain.why else {}))(_command)


def main() -> None:
    """Run the command line. A user's mistake ends in one line on stderr and an exit code."""
    debug = _DEBUG in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != _DEBUG]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, which keeps the measurements
    # At its end the interpreter searches torch's million objects for cycles, which takes most of a second.
    atexit.register(gc.freeze)
    try:
        code = app(args=arguments, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if debug and isinstance(error, Exception):
            raise
        message, code = complaint(error)
        print(f"roofscope: {visible(message)}", file=sys.stderr)
    if code and started_by_torchrun():
        # End at once: destroying a process group waits for a lost rank, and torchrun waits half a minute.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code or 0)


def complaint(error: BaseException) -> tuple[str, int]:
    """Return the line and the exit code of an error: of a request, of the command line, of the device, or internal."""
    if isinstance(error, RoofscopeError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if callable(usage_message := getattr(error, "format_message", None)):
        context = getattr(error, "ctx", None)
        command = f" {context.info_name}" if context is not None and context.parent is not None else ""
        option = getattr(error, "option_name", "")
        if sentence := removed(f"{command} {option}".strip()):
            return sentence, EXIT_REQUEST
        sentence = re.sub(r"(?<![.?!])$", ".", usage_message().strip())
        if (options := getattr(error, "possibilities", None)) is not None:
            sentence = f"there is no option {option}.{near_misses(option, options)}"
        elif number := re.search(r"(--[\w-]+).*should be a valid (integer|number)", sentence):
            sentence = f"{number[1]} needs {'a whole number' if number[2] == 'integer' else 'a number'}."
        return f"{sentence} See `roofscope{command} --help`.", EXIT_REQUEST
    if isinstance(error, RuntimeError) and "CUDA" in str(error):
        return f"the device failed: {first_line(error)}; run `roofscope doctor` to check it.", EXIT_REQUEST
    return f"internal error: {describe_error(error)} (--debug shows more)", 1
