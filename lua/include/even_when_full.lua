-- Lets this script write although the server has reached maxmemory, for what is needed to drain it. Such a server
-- refuses commands that may need memory until a script has written by one that can't; from then on it lets the script
-- finish. So delete a field that nobody ever has. Call it when nothing can be refused any more.
local function even_when_full(record_key)
  redis.call('HDEL', record_key, '')
end
