"""Crosses into Lua: for each script one typed function, which binds its keys and arguments and reads its reply."""
