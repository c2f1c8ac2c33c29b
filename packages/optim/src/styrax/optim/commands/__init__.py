"""The subcommands of `styrax optim`, a file each."""

__all__: list[str] = []
