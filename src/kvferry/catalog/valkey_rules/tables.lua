-- Tables of one call: what was read is remembered, what was changed is written by `flush`.
--
-- A call of a command from Lua costs as much as the command does for dozens of fields, so rules
-- speak of one record at a time and the tables read and write many with one command.

local call, unpack_all, pack, unpack_from, floor, sub, byte, rep
local KEY_BYTES, NO_KEY, NO_HIT = 32, nil, nil

-- Before each call of a function: while a library is loaded, none of these can be seen.
local function bind()
  call, unpack_all, pack, unpack_from = redis.call, unpack, struct.pack, struct.unpack
  floor, sub, byte, rep = math.floor, string.sub, string.byte, string.rep
  NO_KEY, NO_HIT = rep('\0', KEY_BYTES), rep('\0', 24)
end

local BATCH = 200 -- arguments of one command: measured, docs/design/0009

local function in_batches(list, size, work)
  for first = 1, #list, size do
    work(first, math.min(first + size - 1, #list))
  end
end

-- Says a command with pairs or single arguments, as often as need be.
local function say(command, key, arguments)
  in_batches(arguments, BATCH, function(first, last)
    call(command, key, unpack_all(arguments, first, last))
  end)
end

-- A hash. An absent field is false.
local Hash = {}
Hash.__index = Hash

function Hash.new(key)
  return setmetatable({ key = key, known = {}, changed = {} }, Hash)
end

-- Reads many fields, for `get` to find.
function Hash:prefetch(fields)
  local known, missing = self.known, {}
  for _, field in ipairs(fields) do
    if known[field] == nil then
      missing[#missing + 1] = field
    end
  end
  in_batches(missing, BATCH, function(first, last)
    local found = call('HMGET', self.key, unpack_all(missing, first, last))
    for index = first, last do
      known[missing[index]] = found[index - first + 1]
    end
  end)
end

function Hash:get(field)
  local value = self.known[field]
  if value == nil then
    value = call('HGET', self.key, field)
    self.known[field] = value
  end
  return value
end

function Hash:put(field, value)
  self.known[field] = value
  self.changed[field] = true
end

function Hash:delete(field)
  self:put(field, false)
end

-- All fields, as they are now.
function Hash:fields()
  self:flush()
  local found, fields = call('HGETALL', self.key), {}
  for index = 1, #found, 2 do
    self.known[found[index]] = found[index + 1]
    fields[#fields + 1] = found[index]
  end
  return fields
end

function Hash:flush()
  local puts, deletes = {}, {}
  for field in pairs(self.changed) do
    local value = self.known[field]
    if value then
      puts[#puts + 1] = field
      puts[#puts + 1] = value
    else
      deletes[#deletes + 1] = field
    end
  end
  say('HSET', self.key, puts)
  say('HDEL', self.key, deletes)
  self.changed = {}
end

-- A sorted set.
local Sorted = {}
Sorted.__index = Sorted

function Sorted.new(key)
  return setmetatable({ key = key, changed = {} }, Sorted)
end

function Sorted:put(member, score)
  self.changed[member] = score
end

function Sorted:delete(member)
  self.changed[member] = false
end

-- Up to `count` members with the lowest scores, none above `score_max`.
function Sorted:lowest(score_max, count)
  self:flush()
  return call('ZRANGEBYSCORE', self.key, '-inf', score_max, 'LIMIT', 0, count)
end

-- The member with the lowest score, and that; or nil.
function Sorted:first()
  self:flush()
  local found = call('ZRANGE', self.key, 0, 0, 'WITHSCORES')
  return found[1], tonumber(found[2])
end

function Sorted:flush()
  local puts, deletes = {}, {}
  for member, score in pairs(self.changed) do
    if score then
      puts[#puts + 1] = score
      puts[#puts + 1] = member
    else
      deletes[#deletes + 1] = member
    end
  end
  say('ZADD', self.key, puts)
  say('ZREM', self.key, deletes)
  self.changed = {}
end

-- A bit for each slot of a segment, 1 where it is free.
local Bits = {}
Bits.__index = Bits

function Bits.new(key)
  return setmetatable({ key = key, changed = {} }, Bits)
end

-- Writes a set of `count` ones.
function Bits:fill(count)
  local rest = count % 8
  local last = rest > 0 and string.char(256 - 2 ^ (8 - rest)) or ''
  call('SET', self.key, rep('\255', floor(count / 8)) .. last)
  self.packed = nil
end

function Bits:put(slot, is_free)
  self.changed[slot] = is_free and 1 or 0
end

function Bits:is_free(slot)
  local changed = self.changed[slot]
  if changed then
    return changed == 1
  end
  self.packed = self.packed or call('GET', self.key) or ''
  local value = byte(self.packed, floor(slot / 8) + 1)
  return value ~= nil and floor(value / 2 ^ (7 - slot % 8)) % 2 == 1
end

-- Up to `count` free slots, the lowest first.
function Bits:first(count)
  local packed, slots = call('GET', self.key) or '', {}
  local at = string.find(packed, '[^%z]')
  while at and #slots < count do
    local value = byte(packed, at)
    for bit = 7, 0, -1 do
      if floor(value / 2 ^ bit) % 2 == 1 and #slots < count then
        slots[#slots + 1] = (at - 1) * 8 + 7 - bit
      end
    end
    at = string.find(packed, '[^%z]', at + 1)
  end
  return slots
end

function Bits:flush()
  local arguments = {}
  for slot, bit in pairs(self.changed) do
    local count = #arguments
    arguments[count + 1], arguments[count + 2] = 'SET', 'u1'
    arguments[count + 3], arguments[count + 4] = slot, bit
  end
  say('BITFIELD', self.key, arguments)
  self.changed = {}
end

-- The key of the page that was last published in each slot of a segment.
local Keys = {}
Keys.__index = Keys

function Keys.new(key)
  return setmetatable({ key = key, changed = {} }, Keys)
end

function Keys:fill(count)
  call('SET', self.key, rep('\0', count * KEY_BYTES))
end

function Keys:put(slot, name)
  self.changed[slot] = name
end

function Keys:get(slot)
  local first = slot * KEY_BYTES
  return self.changed[slot] or call('GETRANGE', self.key, first, first + KEY_BYTES - 1)
end

-- By slot, from slot 0 on.
function Keys:all()
  self:flush()
  local packed, names = call('GET', self.key) or '', {}
  for first = 1, #packed, KEY_BYTES do
    names[#names + 1] = sub(packed, first, first + KEY_BYTES - 1)
  end
  return names
end

-- Neighbours are written together.
function Keys:flush()
  local slots = {}
  for slot in pairs(self.changed) do
    slots[#slots + 1] = slot
  end
  table.sort(slots)
  local first = 1
  for index = 1, #slots do
    if slots[index + 1] ~= slots[index] + 1 then
      local names = {}
      for member = first, index do
        names[#names + 1] = self.changed[slots[member]]
      end
      call('SETRANGE', self.key, slots[first] * KEY_BYTES, table.concat(names))
      first = index + 1
    end
  end
  self.changed = {}
end
