"""Adds up a round part by part, while its gradients still arrive: in a taker, or in a reducer near the server."""
