"""`python -m redisacc` does what the command `redisacc` does."""

from _redisacc_command import main

if __name__ == "__main__":
    main()
