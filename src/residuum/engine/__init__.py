"""The fast path for MLPs: explicit gradients of the attack's objective, same results as autograd."""
