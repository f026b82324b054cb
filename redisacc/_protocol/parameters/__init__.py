"""Parameters: publishing versions of them, and reading and awaiting the latest."""
