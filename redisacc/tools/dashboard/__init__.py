"""What `redisacc serve` serves: a page, and metrics for Prometheus."""
