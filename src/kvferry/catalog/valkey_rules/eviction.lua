-- Which page of a namespace goes first, and what is remembered of those that went: as
-- catalog/eviction.py says it.

local REACH_MIN, REACH_MAX, REACH_GAIN = 0.125, 8, 4
local GHOSTS_PER_SLOT, BUCKET_GHOSTS, GHOST_BYTES = 2, 64, 5

local function is_lower(one, other)
  for index = 1, #one do
    if one[index] ~= other[index] then
      return one[index] < other[index]
    end
  end
  return false
end

-- The coldest page of a class, or false.
function Book:head(space, class)
  if space.heads[class] == nil then
    local member, score = self:cold(space, class):first()
    space.heads[class] = member and { member = member, age = floor(score / CHUNKS),
      coldness = score % CHUNKS } or false
  end
  return space.heads[class]
end

-- The page that goes first, or nil.
function Book:coldest(space)
  local first, best, best_head = self:head(space, 0), nil, nil
  local once_lives = first and self.is_adaptive and self.age - first.age or 0
  for class = 0, CLASS_COUNT - 1 do
    local head = self:head(space, class)
    if head then
      local rank = { head.age + space.reach * once_lives * class, head.coldness, head.member }
      if not best or is_lower(rank, best) then
        best, best_head = rank, head
      end
    end
  end
  return best_head
end

function Book:ghosts(space)
  space.ghost_table = space.ghost_table or self:table(Hash, 'ghosts:' .. space.number)
  return space.ghost_table
end

function Book:slots_max(space)
  return math.max(1, floor(self.capacity_bytes / self.segment_bytes)) * space.slot_count
end

function Book:bucket_of(space, key)
  local count = math.max(1, floor(GHOSTS_PER_SLOT * self:slots_max(space) / BUCKET_GHOSTS))
  return tostring(unpack_from('<I4', key) % count)
end

local function count_ghost(space, uses, by)
  local kind = uses > 1 and 'again' or 'once'
  space[kind] = space[kind] + by
end

-- After a page was evicted to make room.
function Book:remember(space, key, uses)
  local ghosts, name = self:ghosts(space), self:bucket_of(space, key)
  local bucket = (ghosts:get(name) or '') .. sub(key, 5, 8) .. string.char(uses)
  count_ghost(space, uses, 1)
  if #bucket > BUCKET_GHOSTS * GHOST_BYTES then
    count_ghost(space, byte(bucket, GHOST_BYTES), -1)
    bucket = sub(bucket, GHOST_BYTES + 1)
  end
  ghosts:put(name, bucket)
  self:write_totals(space)
end

-- When a page is published: the uses that it had when it was evicted, 0 if unknown.
function Book:recall(space, key)
  if space.once + space.again == 0 then
    return 0
  end
  local ghosts, name, mark = self:ghosts(space), self:bucket_of(space, key), sub(key, 5, 8)
  local bucket = ghosts:get(name) or ''
  local at = string.find(bucket, mark, 1, true)
  while at and (at - 1) % GHOST_BYTES > 0 do
    at = string.find(bucket, mark, at + 1, true)
  end
  if not at then
    return 0
  end
  local uses = byte(bucket, at + 4)
  ghosts:put(name, sub(bucket, 1, at - 1) .. sub(bucket, at + GHOST_BYTES))
  count_ghost(space, uses, -1)
  self:learn(space, uses)
  return uses
end

-- A ghost of the rarer kind counts for as many of the other kind as there are to one.
function Book:learn(space, uses)
  local mine, other = space.once, space.again
  if uses > 1 then
    mine, other = other, mine
  end
  local factor = 1 + REACH_GAIN / self:slots_max(space) * math.max(1, other / math.max(1, mine))
  local reach = uses > 1 and space.reach * factor or space.reach / factor
  space.reach = math.min(REACH_MAX, math.max(REACH_MIN, reach))
  self:write_totals(space)
end
