"""The operations on accumulators: each is one Lua script, and one function runs it."""
