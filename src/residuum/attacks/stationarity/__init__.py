"""Attacks that find samples whose weighted gradients add up to the weights of a network.

Such an equation holds after training, for example the KKT equation of margin maximization.
"""
