"""Errors whose message is meant for a user, and the nearest right name for a wrong one."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake or a condition that the user can act on: the command host prints it with no traceback.

    Attributes:
        exit_code: What the `styrax` command exits with.
    """

    exit_code = 1


class UsageError(UserError):
    """A command, recipe, key or value that does not exist or does not fit: wrong use, exit code 2."""

    exit_code = 2


def nearest(name: str, options: Iterable[str], n: int = 1) -> str:
    """Say which of `options` was probably meant, as text to append to a message.

    Args:
        name: What was written.
        options: What would have been right.
        n: At most so many suggestions.

    Returns:
        Text that begins with a space, or the empty string when nothing is near.

    Example:
        >>> nearest("stepz", ["steps", "seed"])
        " (did you mean 'steps'?)"
        >>> nearest("lr", ["steps", "learning_rate"])
        " (did you mean 'learning_rate'?)"
        >>> nearest("batch", ["steps", "seed"]), nearest("--stesp", ["--help"])
        ('', '')
    """
    # Dashes are no part of a word: all flags would be alike by them.
    folded = {option.casefold().lstrip("-"): option for option in options}
    name = str(name).casefold().lstrip("-")
    close = difflib.get_close_matches(name, list(folded), n=n, cutoff=0.6)
    if not close:
        initials = ("".join(word[:1] for word in option.split("_")) for option in folded)
        close = [option for option, short in zip(folded, initials) if len(name) > 1 and short == name][:n]
    if not close:
        return ""
    return f" (did you mean {' or '.join(repr(folded[found]) for found in close)}?)"
