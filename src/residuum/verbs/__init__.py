"""One module per public verb. Each computes a result and can write it to a folder."""
