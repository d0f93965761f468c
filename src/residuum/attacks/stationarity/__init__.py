"""Attacks on the stationarity equation: KKT, weight decay, NTK and optimizer state."""
