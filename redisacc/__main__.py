"""`python -m redisacc` does what the command `redisacc` does."""

from redisacc.cli import main

if __name__ == "__main__":
    main(prog_name="redisacc")
