"""A `main` as a command line's program."""

import sys
from collections.abc import Callable


def run_program(main: Callable[[], int | None]) -> None:
    """Run it and exit with its status: what the user can mend ends in one line instead of a stack trace."""
    try:
        status = main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if status:
        sys.exit(status)
