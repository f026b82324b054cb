"""Side-by-side benchmarks: redisacc, other ways to do the same, and the limits of the machine. See ``cli.py``."""
