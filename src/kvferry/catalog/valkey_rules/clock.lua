-- The server's own time, in seconds. `Book.open` makes it monotonic.
local function server_now_s()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end
