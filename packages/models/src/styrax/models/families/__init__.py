"""Model families: what config.json means, and what the tensors are called; one file each."""
