"""Measures peers between hosts with real links: network namespaces on a bridge, with limited rates."""
