"""Attacks that invert a network: find inputs with given gradients or outputs. Also two baselines."""
