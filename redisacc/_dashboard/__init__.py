"""The page that `redisacc dashboard` serves."""
