"""The subcommands of `styrax checkpoint`, a file each."""

__all__: list[str] = []
