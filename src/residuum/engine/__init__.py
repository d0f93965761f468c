"""Loss of an attack and its gradients: explicit formulas for MLPs, automatic differentiation otherwise."""
