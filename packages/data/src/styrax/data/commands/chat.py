"""`styrax data chat`: a token store of conversations or preference pairs; see `styrax.data.chat.command`."""

from styrax.data.chat.command import HELP, run_chat
from styrax.data.chat.command import add_chat_arguments as add_arguments

__all__ = ["HELP", "add_arguments", "run"]

run = run_chat
