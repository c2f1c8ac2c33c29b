"""Reading records from files: text, JSON lines, CSV, Parquet, plain or compressed."""

from styrax.data.build.readers.kinds import Kind, kind_of
from styrax.data.build.readers.pieces import Piece, cut_file, read_piece
from styrax.data.build.readers.streams import Meter

__all__ = ["Kind", "Meter", "Piece", "cut_file", "kind_of", "read_piece"]
