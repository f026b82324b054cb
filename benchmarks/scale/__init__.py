"""A training step on paper: what it sends, what each message costs, and what a step takes with up to 1,000 hosts."""
