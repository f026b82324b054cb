"""Bytes on the sockets of connections: commands, replies and their forms."""
