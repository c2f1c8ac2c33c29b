"""Instruction data: conversations, completions and preference pairs as stores whose tokens say which carry loss."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.data.chat.build import build_chat_store, build_preference_store
    from styrax.data.chat.encode import ChatEncoder, EncodedChat
    from styrax.data.chat.preference import PreferenceData
    from styrax.data.chat.template import ChatTemplate, Rendered

__all__ = [
    "ChatEncoder",
    "ChatTemplate",
    "EncodedChat",
    "PreferenceData",
    "Rendered",
    "build_chat_store",
    "build_preference_store",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ChatEncoder": "encode",
        "ChatTemplate": "template",
        "EncodedChat": "encode",
        "PreferenceData": "preference",
        "Rendered": "template",
        "build_chat_store": "build",
        "build_preference_store": "build",
    },
)
