"""Rounds: waits for one, reads it, acknowledges it, and recovers the rounds of takers that died."""
