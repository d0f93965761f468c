"""Compute the loss of an attack and its gradients, by formulas for MLPs and by autograd otherwise."""
