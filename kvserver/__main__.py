"""Command line: `kvserver serve`, `status`, `explain`, `replay`, `doctor`, and those of `cli.commands`.

Owns: the commands and exit codes. Refuses to know: how anything is done.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import NoReturn

from kvserver import __version__
from kvserver.cli import explain as cli_explain
from kvserver.cli import replay_arguments
from kvserver.cli import status as cli_status
from kvserver.cli.commands import add_commands
from kvserver.cli.http_client import NoAnswer
from kvserver.config import add_flags, chosen_log_format, log_refused_start, read_configuration, unknown_flags
from kvserver.protocol import ConfigError

_DOCTOR_EXAMPLES = """examples:
  kvserver doctor --l1-size 20GiB                 the flags are those of kvserver serve
  kvserver doctor --json | jq '.[] | select(.level == "problem")'
  kvserver doctor --bundle kvserver.tar.gz        for a report: status, config, metrics, log, machine

exit codes: 0 no problem, 1 a problem, as where the daemon that runs is not ready, 2 bad arguments; with --bundle 0 written, 2 not written
"""


class _Parser(argparse.ArgumentParser):
    """A fault in the flags of `serve` is a refused start, which the log's form has."""

    def error(self, message: str) -> NoReturn:
        if self.prog.endswith(" serve"):
            raise ConfigError(message)
        super().error(message)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvserver", description="A KV-cache server for LLM inference engines.")
    parser.add_argument("--version", action="version", version=f"kvserver {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    add_flags(commands.add_parser("serve", help="run the daemon"))
    cli_status.add_arguments(
        commands.add_parser("status", help="what the daemon of this machine does", epilog=cli_status.EXIT_CODES)
    )
    cli_explain.add_arguments(commands.add_parser("explain", help="why a request's prompt was computed, not loaded"))
    replay_arguments.add_arguments(
        commands.add_parser("replay", help="what caches of other sizes would have found of a trace")
    )
    doctor = commands.add_parser(
        "doctor",
        help="what is wrong with this machine, and how to fix it",
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="a list of {check, level, text, fix}")
    doctor.add_argument("--python", default="", metavar="PATH", help="the interpreter of vLLM's environment")
    doctor.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help="ask this vLLM server, and nothing else, whether its cache is on, and why not; may be given again",
    )
    doctor.add_argument(
        "--bundle", metavar="FILE", help="write all that helps to find a fault to this tar.gz, without secrets"
    )
    doctor.add_argument(
        "--log", default="", metavar="FILE", help="with --bundle: the daemon's log, if its stderr is no file"
    )
    doctor.add_argument("--overwrite", action="store_true", help="with --bundle: replace FILE")
    add_flags(doctor)  # of the daemon that is to run
    add_commands(commands)
    arguments = argparse.Namespace(command="serve", **_log_format(sys.argv[1:] if argv is None else argv))
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown and arguments.command != "serve":
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if unknown:
            raise ConfigError(unknown_flags(unknown))
        return _run(arguments)
    except ConfigError as error:
        serves = arguments.command == "serve"
        log_refused_start(str(error), chosen_log_format(vars(arguments)) if serves else "text")
        return 2
    except NoAnswer as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `kvserver status --watch | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's last flush fails too
        return 0


def _log_format(words: list[str]) -> dict[str, str]:
    """The flag as it is given in words that cannot be parsed as a whole."""
    flag = "--log-format"
    given = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    given += [value for word, value in itertools.pairwise(words) if word == flag]
    return {"log_format": given[-1]} if given else {}


def _run(arguments: argparse.Namespace) -> int:
    """Imports are here so that `kvserver status` starts fast, and `doctor` where the daemon cannot."""
    if "run" in arguments:
        return int(arguments.run(arguments))
    if arguments.command == "serve":
        from kvserver.daemon import serve

        serve(read_configuration(vars(arguments)))
    if arguments.command == "doctor":
        from kvserver.cli import doctor

        return doctor.main(arguments)
    if arguments.command == "explain":
        return cli_explain.main(arguments)
    if arguments.command == "replay":
        from kvserver.cli import replay

        return replay.main(arguments)
    return cli_status.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
