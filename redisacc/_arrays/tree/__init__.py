"""Trees of arrays: their structure, and their leaves as arrays."""
