"""The public functions of residuum, one module each. A function can also write its result to a folder."""
