"""Side-by-side benchmarks of redisacc, its alternatives, and the limits of the machine. See ``cli.py``."""
