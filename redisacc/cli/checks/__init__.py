"""What `redisacc doctor` checks, one module for each subject."""
