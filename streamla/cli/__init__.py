"""The command line. `main` is the console script: it turns what users can cause into one clear line."""

from __future__ import annotations

import sys

_EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "cli", "pynvml": "bench"}
BAD_INPUT = 2


def main() -> None:
    """Run `streamla`. Exit codes: 0 fine, 1 the check failed, 2 the input was wrong."""
    try:
        from streamla.cli.app import app

        app()
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module not in _EXTRAS:
            raise
        extra = _EXTRAS[module]
        _stop(f"this command needs {module}: pip install 'streamla[{extra}]'")
    except (ValueError, TypeError, OSError) as error:
        _stop(str(error))


def _stop(message: str) -> None:
    print(f"streamla: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)
