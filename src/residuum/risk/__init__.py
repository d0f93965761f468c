"""The owner's side: which records are at risk, told from weights and data without an attack."""
