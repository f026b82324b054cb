"""What people run beside the library: the command and what it shows. Nothing in the library imports it."""
