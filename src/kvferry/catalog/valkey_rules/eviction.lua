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
function Book:head(share, class)
  if share.heads[class] == nil then
    local member, score = self:cold(share, class):first()
    share.heads[class] = member and { member = member, age = floor(score / CHUNKS),
      coldness = score % CHUNKS } or false
  end
  return share.heads[class]
end

-- The page that goes first, or nil.
function Book:coldest(share)
  local first, best, best_head = self:head(share, 0), nil, nil
  local once_lives = first and self.is_adaptive and self.age - first.age or 0
  local reach = self:learned(share.space).reach
  for class = 0, CLASS_COUNT - 1 do
    local head = self:head(share, class)
    if head then
      local rank = { head.age + reach * once_lives * class, head.coldness, head.member }
      if not best or is_lower(rank, best) then
        best, best_head = rank, head
      end
    end
  end
  return best_head
end

-- The page that was not used for longest, or nil.
function Book:oldest(share)
  local best, best_head
  for class = 0, CLASS_COUNT - 1 do
    local head = self:head(share, class)
    local rank = head and { head.age, head.coldness, head.member }
    if rank and (not best or is_lower(rank, best)) then
      best, best_head = rank, head
    end
  end
  return best_head
end

function Book:ghosts(space)
  space.ghost_table = space.ghost_table or self:table(Hash, 'ghosts:' .. space.number)
  return space.ghost_table
end

function Book:slots_max(space)
  return math.max(1, self:segments_max()) * space.slot_count
end

function Book:bucket_of(space, key)
  local count = math.max(1, floor(GHOSTS_PER_SLOT * self:slots_max(space) / BUCKET_GHOSTS))
  return tostring(unpack_from('<I4', key) % count)
end

local function count_ghost(learned, uses, by)
  local kind = uses > 1 and 'again' or 'once'
  learned[kind] = learned[kind] + by
end

-- After a page was evicted to make room.
function Book:remember(space, key, uses)
  local ghosts, name = self:ghosts(space), self:bucket_of(space, key)
  local bucket = (ghosts:get(name) or '') .. sub(key, 5, 8) .. string.char(uses)
  count_ghost(self:learned(space), uses, 1)
  if #bucket > BUCKET_GHOSTS * GHOST_BYTES then
    count_ghost(self:learned(space), byte(bucket, GHOST_BYTES), -1)
    bucket = sub(bucket, GHOST_BYTES + 1)
  end
  ghosts:put(name, bucket)
  self:write_learned(space)
end

-- When a page is published: the uses that it had when it was evicted, 0 if unknown.
function Book:recall(space, key)
  local learned = self:learned(space)
  if learned.once + learned.again == 0 then
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
  count_ghost(learned, uses, -1)
  self:learn(space, uses)
  return uses
end

-- A ghost of the rarer kind counts for as many of the other kind as there are to one.
function Book:learn(space, uses)
  local learned = self:learned(space)
  local mine, other = learned.once, learned.again
  if uses > 1 then
    mine, other = other, mine
  end
  local factor = 1 + REACH_GAIN / self:slots_max(space) * math.max(1, other / math.max(1, mine))
  local reach = uses > 1 and learned.reach * factor or learned.reach / factor
  learned.reach = math.min(REACH_MAX, math.max(REACH_MIN, reach))
  self:write_learned(space)
end
