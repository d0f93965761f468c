"""Compute the loss of an attack and its gradients: by formulas for MLPs, by autograd for other networks."""
