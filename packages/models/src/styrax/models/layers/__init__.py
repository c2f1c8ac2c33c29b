"""The parts of a decoder block."""
