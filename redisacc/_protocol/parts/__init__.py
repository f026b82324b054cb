"""The parts of large gradients and parameters: writing them, fetching them, and removing what is over."""
