"""What is done with an accumulator: one operation, one Lua script, one function that runs it."""
