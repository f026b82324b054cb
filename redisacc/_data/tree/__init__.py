"""Trees of arrays: their structure, what an accumulator of one was created as, and how a gradient is packed."""
