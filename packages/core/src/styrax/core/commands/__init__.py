"""The commands of core itself."""

__all__: list[str] = []
