-- What ends by itself, and who gives way when room is needed: as catalog/sweeping.py says it.

local HIGH_MARK_PART = 8

function Verbs.sweep(book, packed, can_grow)
  local before = book.counts.evicted
  local expired = book:end_timers()
  book:end_creations()
  book:forget_spaces()
  book:make_room(packed, can_grow == '1')
  book.counts.expired = expired
  local deletable = book:deletable()
  return OK .. pack('<I4I4', expired, book.counts.evicted - before) .. table.concat(deletable)
end

-- Ends leases and grace times that are over; returns how many leases.
function Book:end_timers()
  local timers, lease_count = self:timers(), 0
  local due = timers:lowest(self.now_s, 1000)
  while #due > 0 do
    for _, member in ipairs(due) do
      local kind, number, slot = unpack_from(TIMER, member)
      local segment = self:segment(number)
      if kind == LEASE then
        local lease_end_s = self:reservation(segment, slot).lease_end_s
        self:end_reservation(segment, slot)
        self:start_grace(segment, slot, lease_end_s + self.grace_s)
        lease_count = lease_count + 1
      else
        timers:delete(member)
        self:busy(segment):delete(tostring(slot))
        self:count(segment, 'graced', -1)
        if segment.state == READY then
          self:free(segment, slot)
        end
      end
    end
    due = timers:lowest(self.now_s, 1000)
  end
  return lease_count
end

function Book:end_creations()
  for _, number in ipairs(self:listed('creating', self.now_s)) do
    self:set_state(self:segment(number), EMPTIED, self.now_s)
  end
end

function Book:forget_spaces()
  self:flush_segments()
  local attached = self:table(Sorted, 'attached')
  for _, namespace in ipairs(attached:lowest(self.now_s - SPACE_IDLE_S, -1)) do
    local space = self:space(namespace)
    if space.segments == 0 then
      attached:delete(namespace)
      self:forget_lookups(namespace)
      self:table(Hash, 'spaces'):delete(namespace)
      self:table(Hash, 'totals'):delete(tostring(space.number))
      self:drop(self:ghosts(space))
      self.spaces[namespace] = false
    end
  end
end

-- Emptied segments that nobody may still write to or read from.
function Book:deletable()
  local numbers = {}
  for _, number in ipairs(self:listed('emptied', self.now_s)) do
    local segment = self:segment(number)
    if segment.reserved == 0 and segment.graced == 0 then
      numbers[#numbers + 1] = pack('<I4', number)
    end
  end
  return numbers
end

-- Reserved slots stay their writers' until the leases end, but are not published.
function Book:empty(segment)
  local space, keys = segment.space, {}
  if segment.state == READY then
    keys = self:keys(segment):all()
  end
  self:set_state(segment, EMPTIED, self.now_s + self.grace_s)
  if segment.pages > 0 then
    self:pages(space):prefetch(keys)
  end
  for index, key in ipairs(segment.pages > 0 and keys or {}) do
    local page = self:page(space, key)
    if page and page.segment == segment.number and page.slot == index - 1 then
      self:remove_page(space, key, page)
    end
  end
  self:drop(self:bits(segment))
  self:drop(self:keys(segment))
  segment.bit_table, segment.key_table = nil, nil
end

-- Deletes a whole table, and what was still to be written to it.
function Book:drop(found)
  call('UNLINK', found.key)
  self.tables[found.key] = nil
end

function Book:forget_segment(segment)
  local busy, timers = self:busy(segment), self:timers()
  for _, slot in ipairs(busy:fields()) do
    timers:delete(pack(TIMER, LEASE, segment.number, tonumber(slot)))
    timers:delete(pack(TIMER, GRACE, segment.number, tonumber(slot)))
  end
  self:count(segment, 'reserved', -segment.reserved)
  self:count(segment, 'graced', -segment.graced)
  self:drop(busy)
  self:flush_segments()
  for list in pairs(segment.lists) do
    self:table(Sorted, list):delete(tostring(segment.number))
  end
  self:table(Hash, 'segments'):delete(tostring(segment.number))
  segment.space.segments = segment.space.segments - 1
  self:write_totals(segment.space)
  self.segments[segment.number] = false
end

-- READY segments: those without pages, then the oldest on average.
local function coldest_first(segments, is_asked)
  local ready = {}
  for _, segment in ipairs(segments) do
    if segment.state == READY and is_asked(segment) then
      ready[#ready + 1] = segment
      segment.mean_age = segment.pages > 0 and segment.ages / segment.pages or 0
    end
  end
  table.sort(ready, function(one, other)
    if one.mean_age ~= other.mean_age then
      return one.mean_age < other.mean_age
    end
    return one.number < other.number
  end)
  return ready
end

-- `wanted`: namespaces, and how many slots each wants.
function Book:make_room(wanted, can_grow)
  local room_max = floor(self.capacity_bytes / self.segment_bytes)
  self:flush_segments()
  self:table(Sorted, 'emptied'):flush()
  local spare = room_max - self:segment_count() + call('ZCARD', self.root .. ':emptied')
  if spare < 0 then -- the store was made smaller
    local ready = coldest_first(self:all_segments(), function() return true end)
    for index = 1, math.min(-spare, #ready) do
      self:empty(ready[index])
    end
  end
  if not can_grow then -- the disk has less than the budget
    spare = 0
  end
  for _, piece in ipairs(pieces(wanted, 36)) do
    local space = self:space(sub(piece, 1, 32))
    if space then
      spare = self:make_room_for(space, unpack_from('<I4', piece, 33), math.max(0, spare))
    end
  end
end

-- `spare`: segments that may still be grown; returns how many are left to others.
function Book:make_room_for(space, count, spare)
  local missing = count - space.soon_free
  if missing <= 0 then
    return spare
  end
  missing = missing + floor(count / HIGH_MARK_PART)
  local idle = self:idle(space)
  while missing > 0 do
    if spare > 0 then
      spare = spare - 1
      missing = missing - space.slot_count
    elseif #idle > 0 then
      self:empty(table.remove(idle, 1))
      spare = spare + 1
    else
      local victim = self:coldest_space(space)
      if not victim then
        break
      elseif victim == space then
        self:evict_coldest(space)
        missing = missing - 1
      else
        local used = coldest_first(self:all_segments(), function(segment)
          return segment.space == victim and segment.pages > 0
        end)
        self:empty(used[1])
        spare = spare + 1
      end
    end
  end
  return spare
end

-- Segments of other namespaces with nothing in them, and not just grown.
function Book:idle(space)
  local idle = {}
  for _, number in ipairs(self:listed('idle', '+inf')) do
    local segment = self:segment(number)
    if segment.space ~= space and segment.until_s <= self.now_s then
      idle[#idle + 1] = segment
    end
  end
  return idle
end

-- Whose page is the coldest of all; at equal age who has the most segments, then `wanting`.
function Book:coldest_space(wanting)
  local best
  for _, space in ipairs(self:all_spaces()) do
    local head = space.ready > 0 and self:coldest(space)
    if head then
      local rank = { head.age, -space.ready, space == wanting and 0 or 1,
        space.namespace, space = space }
      if not best or is_lower(rank, best) then
        best = rank
      end
    end
  end
  return best and best.space
end

function Book:all_spaces()
  if not self.listed_spaces then
    self.listed_spaces = {}
    for _, namespace in ipairs(self:table(Hash, 'spaces'):fields()) do
      table.insert(self.listed_spaces, self:space(namespace))
    end
  end
  return self.listed_spaces
end

function Book:evict_coldest(space)
  local number, slot = unpack_from(ADDRESS, self:coldest(space).member)
  local key = self:keys(self:segment(number)):get(slot)
  local page = self:page(space, key)
  self:evict_page(space, key, page)
  if self.is_adaptive then
    self:remember(space, key, page.uses)
  end
end
