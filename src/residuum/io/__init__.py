"""Read model files safely, once, into a Release, and turn releases and live models into networks."""
