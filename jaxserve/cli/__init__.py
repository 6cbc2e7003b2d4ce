"""The command line: ``jaxserve serve | pull | verify | models | ...``.

Knows how a command ends: an error is one sentence on standard error and an exit code. What the commands do stands in
the modules beside this one, and they only put together what the rest of the package does.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from jaxserve import __version__
from jaxserve.cli.keys import keys
from jaxserve.cli.models import models, verify
from jaxserve.cli.pull import pull
from jaxserve.cli.running import bench, check, generate, plan, score, serve
from jaxserve.cli.settings import config
from jaxserve.errors import JaxserveError

EX_SOFTWARE = 70  # sysexits.h: a mistake of ours
INTERRUPTED = 130  # what a shell reports after Ctrl-C


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jaxserve")
@click.option("--debug", is_flag=True, help="Show where an error came from.")
def cli(debug: bool) -> None:
    """Serve language models with JAX."""


for command in (bench, check, config, generate, keys, models, plan, pull, score, serve, verify):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    debug = False
    try:
        with cli.make_context("jaxserve", list(arguments)) as context:
            debug = context.params["debug"]
            cli.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code, debug=debug)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except JaxserveError as error:
        return _fail(error.message, error.exit_code, debug=debug)
    except BrokenPipeError:
        # Nobody reads on. The interpreter flushes once more at its end: into nothing, or it would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001  nobody above could say it better
        sentence = f"unexpected {type(error).__name__}: {error} (`jaxserve --debug` shows where it came from)"
        return _fail(sentence, EX_SOFTWARE, debug=debug)
    return 0


def _fail(sentence: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    click.echo(f"jaxserve: {sentence}", err=True)
    return code


def main() -> None:
    """The ``jaxserve`` program."""
    sys.exit(run(sys.argv[1:]))
