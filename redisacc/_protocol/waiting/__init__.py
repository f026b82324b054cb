"""How a call waits: it polls, logs now and then what it waits for, and ends when its handle is closed."""
