"""residuum: what remains of the training data in a trained network's weights?"""
