"""The commands `styrax train`, `styrax generate` and `styrax report`."""
