-- What ends by itself, and who gives way when room is needed: as catalog/sweeping.py says it.

local HIGH_MARK_PART = 8
local WANT, WANT_BYTES = '<c32I4c16', 52

function Verbs.sweep(book, packed, can_grow)
  local before = book.counts.evicted
  local expired = book:end_timers()
  book:end_creations()
  book:forget_spaces()
  book:lapse()
  book:make_room(packed, can_grow == '1')
  book.counts.expired = expired
  local deletable = book:deletable()
  return OK .. pack('<I4I4I4I4', expired, book.counts.evicted - before,
    book.counts.quota_evicted, book.counts.lapsed) .. table.concat(deletable)
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
    local space, segment_count = self:space(namespace), 0
    local shares = self:shares_of(space)
    for _, share in ipairs(shares) do
      segment_count = segment_count + share.segments
    end
    if segment_count == 0 then
      for _, share in ipairs(shares) do
        self:forget_share(share)
      end
      attached:delete(namespace)
      self:forget_lookups(namespace)
      self:table(Hash, 'spaces'):delete(namespace)
      self:table(Hash, 'learned'):delete(tostring(space.number))
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
  local space, keys = segment.share.space, {}
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
  segment.share.segments = segment.share.segments - 1
  self:write_totals(segment.share)
  self.segments[segment.number] = false
end

-- Whether none of these owners is the share's; false if there is none.
local function is_outside(share, owners)
  for _, owner in ipairs(owners) do
    if owner == share.space.namespace or owner == share.tenant then
      return false
    end
  end
  return #owners > 0
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

-- Evicts pages that nobody used for their time to live, so many at most, share by share.
function Book:lapse()
  local rows, has_ttl = self:quotas(), false
  for _, row in pairs(rows) do
    has_ttl = has_ttl or row.ttl_s > 0
  end
  if not has_ttl then
    return
  end
  local shares = {}
  for _, share in ipairs(self:all_shares()) do
    shares[#shares + 1] = { share.space.namespace, share.tenant, share = share }
  end
  table.sort(shares, is_lower)
  for _, named in ipairs(shares) do
    local ttl_s = named.share.ready > 0 and ttl_of(rows, named.share)
    if ttl_s and self.now_s > ttl_s then
      self:lapse_share(named.share, floor((self.now_s - ttl_s) / AGE_STEP_S) - 1)
    end
  end
end

function Book:lapse_share(share, age_max)
  while self.counts.lapsed < LAPSED_MAX do
    local head = self:oldest(share)
    if not head or head.age > age_max then
      break
    end
    self:evict_at(share, head.member)
    self.counts.lapsed = self.counts.lapsed + 1
  end
end

-- `wanted`: namespaces, how many slots each wants, and for which tenant.
function Book:make_room(wanted, can_grow)
  local room_max = self:segments_max()
  self:flush_segments()
  self:table(Sorted, 'emptied'):flush()
  local live = self:segment_count() - call('ZCARD', self.root .. ':emptied')
  local ledger = Ledger.new(self, room_max, live, 'live')
  for _, owner in ipairs(ledger:above()) do
    self:lower(ledger, owner)
  end
  while ledger.total > room_max do -- the store was made smaller
    local segment = self:missed_least(ledger, nil)
    if not segment then
      break
    end
    self:take(ledger, segment)
  end
  ledger.room_max = can_grow and math.max(room_max, ledger.total) or ledger.total
  for _, piece in ipairs(pieces(wanted, WANT_BYTES)) do
    local namespace, count, tenant = unpack_from(WANT, piece)
    local space = self:space(namespace)
    if space then
      self:make_room_for(ledger, space, tenant, count)
    end
  end
end

-- Brings an owner down to its maximum.
function Book:lower(ledger, owner)
  while ledger:is_above(owner) do
    local segment = self:missed_least(ledger, owner)
    if not segment then
      break
    end
    self.counts.quota_evicted = self.counts.quota_evicted + self:take(ledger, segment)
  end
end

-- The segment that is missed least, if need be one that is guaranteed; or nil.
function Book:missed_least(ledger, owner)
  local found = coldest_first(self:all_segments(), function(segment)
    return not owner or owner == segment.share.space.namespace or owner == segment.share.tenant
  end)
  for _, segment in ipairs(found) do
    if ledger:may_lose(segment.share) then
      return segment
    end
  end
  return found[1]
end

-- Empties a segment; returns how many pages it had.
function Book:take(ledger, segment)
  local page_count = segment.pages
  self:empty(segment)
  ledger:add(segment.share, -1)
  return page_count
end

function Book:make_room_for(ledger, space, tenant, count)
  local share = self:share(space, tenant) or { space = space, tenant = tenant, soon_free = 0 }
  count = math.min(count, ledger:slots_max(share))
  local missing = count - share.soon_free
  if missing <= 0 then
    return
  end
  missing = missing + floor(count / HIGH_MARK_PART)
  for _, owner in ipairs(ledger:below(share)) do
    ledger:claim(owner, self.now_s + CREATION_S)
  end
  local idle = self:idle(share)
  while missing > 0 do
    if ledger:spare(share) > 0 then
      ledger:add(share, 1)
      missing = missing - space.slot_count
    else
      local is_bound, before = ledger:is_bound(share), self.counts.evicted
      local segment = self:take_idle(ledger, idle, share)
      local victim = not segment and self:victim(ledger, share)
      if not segment and not victim then
        break
      elseif victim == share then
        self:evict_coldest(share)
        missing = missing - 1
      else
        self:take(ledger, segment or coldest_first(self:all_segments(), function(used)
          return used.share == victim and used.pages > 0
        end)[1])
      end
      if is_bound then
        self.counts.quota_evicted = self.counts.quota_evicted + self.counts.evicted - before
      end
    end
  end
end

-- Segments of other shares with nothing in them, and not just grown.
function Book:idle(share)
  local idle = {}
  for _, number in ipairs(self:listed('idle', '+inf')) do
    local segment = self:segment(number)
    if segment.share ~= share and segment.until_s <= self.now_s then
      idle[#idle + 1] = segment
    end
  end
  return idle
end

-- Takes the first that is of use out of the list; or nil.
function Book:take_idle(ledger, idle, share)
  for index, segment in ipairs(idle) do
    if ledger:gains(share, segment.share) then
      return table.remove(idle, index)
    end
  end
end

-- Whose page is the coldest of all that may give; at equal age who has the most segments, then
-- `wanting`. Who wants below its guarantee takes from others if it can.
function Book:victim(ledger, wanting)
  local best, best_other
  local below = ledger:below(wanting)
  for _, share in ipairs(self:all_shares()) do
    local may_give = share.ready > 0
      and (share == wanting or ledger:may_give(share, wanting))
    local head = may_give and self:coldest(share)
    if head then
      local rank = { head.age, -share.ready, share == wanting and 0 or 1,
        share.space.namespace, share.tenant, share = share }
      if not best or is_lower(rank, best) then
        best = rank
      end
      if is_outside(share, below) and (not best_other or is_lower(rank, best_other)) then
        best_other = rank
      end
    end
  end
  best = best_other or best
  return best and best.share
end

function Book:evict_coldest(share)
  local key, uses = self:evict_at(share, self:coldest(share).member)
  if self.is_adaptive then
    self:remember(share.space, key, uses)
  end
end

-- `member`: an address. Returns the page's key and uses.
function Book:evict_at(share, member)
  local number, slot = unpack_from(ADDRESS, member)
  local key = self:keys(self:segment(number)):get(slot)
  local page = self:page(share.space, key)
  self:evict_page(share.space, key, page)
  return key, page.uses
end
