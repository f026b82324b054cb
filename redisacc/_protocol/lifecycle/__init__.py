"""Opens, describes and deletes whole accumulators, and reads their events."""
