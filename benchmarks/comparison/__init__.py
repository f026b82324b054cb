"""The same training in one process, with DDP, in Horovod's documented form, and with redisacc."""
