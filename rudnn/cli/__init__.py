"""The `rudnn` command: exit code 0, 1 for a check or a build that failed, 2 for bad arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_FAILURE, _USAGE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    import typer

    from ..errors import CompileError, LaunchError, LoadError, RudnnError
    from .app import app
    from .arguments import BadArgument, spread

    command = typer.main.get_command(app)
    words = spread(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        result = command.main(words, prog_name="rudnn", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (CompileError, LaunchError, LoadError) as error:
        return _tell(str(error), _FAILURE)
    except (BadArgument, RudnnError) as error:
        return _tell(str(error), _USAGE)
    except BrokenPipeError:
        _leave_quietly()
    except OSError as error:
        what = f": {error.filename}" if error.filename else ""
        return _tell(f"{error.strerror or error}{what}", _USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _tell("interrupted", _INTERRUPTED)
    except Exception as error:
        # Usage errors: typer's class for them is another one in each of its versions.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _tell(f"{message()} See rudnn {words[0]} --help.", _USAGE)


def _tell(message: str, code: int) -> int:
    print(f"rudnn: {' '.join(message.split())}", file=sys.stderr)
    return code


def _leave_quietly() -> NoReturn:
    """The reader of our output is gone (`rudnn ops | head`): nothing more can be said."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(141)


__all__ = ["main"]
