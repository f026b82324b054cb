-- Lets this script write although the server has reached maxmemory, because its writes are needed to drain the server.
-- A full server refuses commands that may need memory until the script has written with a command that can't need any,
-- and from then on lets the script finish. So this deletes a field that never exists. Call it when the script can no
-- longer refuse the request.
local function even_when_full(record_key)
  redis.call('HDEL', record_key, '')
end
