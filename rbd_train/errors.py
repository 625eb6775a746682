"""The ways a command ends without its result, and the exit code of each; text that is safe to print."""


class UsageError(Exception):
    """Report a fault of the command or its configuration (exit code 2): an unknown key, a missing API key."""


class DataError(Exception):
    """Report a fault of an input or a result (exit code 1), with file, line and field where they are known."""


class IncompleteError(Exception):
    """Report that calls are still without an answer (exit code 1); the same command continues them."""


class DryRun(Exception):  # noqa: N818
    """Report what a run would ask for (exit code 0): `dry_run=true` ends here, before the first call."""


def printable(text: str) -> str:
    """Show control characters as codes: what was judged, or named by others, must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
