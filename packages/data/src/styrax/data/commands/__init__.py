"""The subcommands of `styrax data`, a file each."""

__all__: list[str] = []
