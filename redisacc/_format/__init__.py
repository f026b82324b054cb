"""The data model: how everything in Redis is written as bytes and text. Pure functions, without I/O."""
