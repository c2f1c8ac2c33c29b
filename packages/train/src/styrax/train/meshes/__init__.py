"""What a mesh splits, and how: `styrax mesh`."""
