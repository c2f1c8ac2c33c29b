"""The subcommands of `styrax models`, a file each."""

__all__: list[str] = []
