"""The screen, or a log file."""

from rich.console import Console

LOG_WIDTH = 170  # of a log file: a table's row has a line to itself


def make_console() -> Console:
    """For the screen, or for a log file."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)
