-- The records of one store during one call. See docs/design/0009 for the keys and what is in them.
--
-- A verb gets a `Book`, changes it, and it is flushed if the verb succeeds. Numbers of namespaces
-- ("spaces"), shares and segments are plain; an address is 8 bytes, so that it sorts.

local AGE_STEP_S, CREATION_S = 10, 60
local USES_MAX, CLASS_COUNT, REACH_FIRST = 15, 4, 0.5
local SPACE_IDLE_S, ATTACH_STEP_S = 86400, 3600 -- as in catalog/base.py
local LAPSED_MAX = 1024
local CHUNKS = 2 ^ 24 -- of a score: age * CHUNKS + how far the chunk is from the greatest index
local CREATING, READY, EMPTIED = 1, 2, 3
local LEASE, GRACE = 1, 2

local SEGMENT = '>I4I4c32c16BdI4I4I4I4d'
local TOTALS = '>I4I4I4I4I4I4I4'
local LEARNED = '>dI4I4'
local SIZES = '>I4I4dI4I4'
local PAGE = '<I4I4c16I4I4c32B'
local ADDRESS = '>I4I4'
local TIMER = '>BI4I4'

local Book = {}
Book.__index = Book

-- nil: these are not the records that the caller opened.
function Book.open(root, catalog_id, grace_s, is_adaptive)
  local found = call('HMGET', root, 'catalog_id', 'offset_s', 'last_s', 'capacity_bytes',
    'segment_bytes', 'next_segment', 'next_space', 'next_share')
  if found[1] ~= catalog_id then
    return nil
  end
  local book = setmetatable({
    root = root,
    grace_s = grace_s,
    is_adaptive = is_adaptive,
    offset_s = tonumber(found[2]),
    capacity_bytes = tonumber(found[4]),
    segment_bytes = tonumber(found[5]),
    next_segment = tonumber(found[6]),
    next_space = tonumber(found[7]),
    next_share = tonumber(found[8]),
    counts = { published = 0, duplicate = 0, expired = 0, evicted = 0, lookup = 0, hit = 0,
      quota_refused = 0, quota_evicted = 0, lapsed = 0 },
    lookups = {},
    spaces = {},
    shares = {},
    segments = {},
    tables = {},
  }, Book)
  local last_s, server_s = tonumber(found[3]), server_now_s()
  if server_s + book.offset_s < last_s then -- the server's clock went back: go on from there
    book.offset_s = last_s - server_s
  end
  book.now_s = math.max(last_s, server_s + book.offset_s)
  book.age = floor(book.now_s / AGE_STEP_S)
  return book
end

function Book:table(kind, name)
  local key = self.root .. ':' .. name
  self.tables[key] = self.tables[key] or kind.new(key)
  return self.tables[key]
end

function Book:flush()
  self:flush_segments()
  for _, found in pairs(self.tables) do
    found:flush()
  end
  for field, count in pairs(self.lookups) do
    call('HINCRBY', self.root .. ':lookups', field, count)
  end
  call('HSET', self.root, 'last_s', self.now_s, 'offset_s', self.offset_s,
    'next_segment', self.next_segment, 'next_space', self.next_space,
    'next_share', self.next_share)
  for name, count in pairs(self.counts) do
    if count > 0 then
      call('HINCRBY', self.root, name, count)
    end
  end
end

-- What `packed` says that was looked up and found, by namespace.
function Book:add_lookups(packed)
  for first = 1, #packed, KEY_BYTES + 8 do
    local namespace, lookups, hits = unpack_from('<c32I4I4', packed, first)
    self.lookups[namespace .. 'L'], self.lookups[namespace .. 'H'] = lookups, hits
    self.counts.lookup, self.counts.hit = self.counts.lookup + lookups, self.counts.hit + hits
  end
end

function Book:forget_lookups(namespace)
  for _, field in ipairs({ namespace .. 'L', namespace .. 'H' }) do
    self.lookups[field] = nil
    call('HDEL', self.root .. ':lookups', field)
  end
end

-- Namespaces.

-- nil: unknown.
function Book:space(namespace)
  local space = self.spaces[namespace]
  if space == nil then
    local packed = self:table(Hash, 'spaces'):get(namespace)
    space = packed and self:read_space(namespace, packed)
    self.spaces[namespace] = space
  end
  return space or nil
end

function Book:read_space(namespace, packed)
  local number, slot_count, slot_bytes, slice_count, chunk_tokens = unpack_from(SIZES, packed)
  return {
    namespace = namespace,
    number = number,
    slot_count = slot_count,
    slot_bytes = slot_bytes,
    slice_count = slice_count,
    chunk_tokens = chunk_tokens,
  }
end

-- What evictions taught: `reach`, and how many ghosts there are of pages used once and more often.
function Book:learned(space)
  if not space.learned then
    local reach, once, again =
      unpack_from(LEARNED, self:table(Hash, 'learned'):get(tostring(space.number)))
    space.learned = { reach = reach, once = once, again = again }
  end
  return space.learned
end

function Book:write_learned(space)
  local learned = space.learned
  self:table(Hash, 'learned'):put(tostring(space.number),
    pack(LEARNED, learned.reach, learned.once, learned.again))
end

function Book:pages(space)
  space.page_table = space.page_table or self:table(Hash, 'pages:' .. space.number)
  return space.page_table
end

-- Segments. Figures are those of `SegmentHeat`.

-- nil: unknown.
function Book:segment(number)
  local segment = self.segments[number]
  if segment == nil then
    local packed = self:table(Hash, 'segments'):get(tostring(number))
    segment = packed and self:read_segment(number, packed)
    self.segments[number] = segment
  end
  return segment or nil
end

function Book:read_segment(number, packed)
  local _, _, namespace, tenant, state, until_s, slot_count, pages, reserved, graced, ages =
    unpack_from(SEGMENT, packed)
  local segment = {
    number = number,
    share = self:share(self:space(namespace), tenant),
    state = state,
    until_s = until_s,
    slot_count = slot_count,
    pages = pages,
    reserved = reserved,
    graced = graced,
    ages = ages,
  }
  segment.lists = self:lists_of(segment)
  return segment
end

-- Changes one figure, and its sum over the share. `figure`: pages, reserved or graced.
function Book:count(segment, figure, by)
  segment[figure] = segment[figure] + by
  segment.is_changed = true
  local share = segment.share
  share[figure] = share[figure] + by
  if segment.state ~= EMPTIED and figure ~= 'graced' then
    share.soon_free = share.soon_free - by
  end
end

function Book:set_state(segment, state, until_s)
  local share = segment.share
  local loose = segment.slot_count - segment.pages - segment.reserved
  local function sum(of, sign)
    if of == READY then
      share.ready = share.ready + sign
    end
    if of ~= EMPTIED then
      share.live = share.live + sign
      share.soon_free = share.soon_free + sign * loose
    end
  end
  if segment.state then
    sum(segment.state, -1)
  end
  sum(state, 1)
  segment.state, segment.until_s, segment.is_changed = state, until_s, true
end

-- The lists that a segment is found in, and its scores there.
function Book:lists_of(segment)
  local is_ready, used = segment.state == READY, segment.pages + segment.reserved
  local has_free = is_ready and used + segment.graced < segment.slot_count
  return {
    ['free:' .. segment.share.number] = has_free and segment.number,
    idle = is_ready and used == 0 and segment.number,
    creating = segment.state == CREATING and segment.until_s,
    emptied = segment.state == EMPTIED and segment.until_s,
  }
end

-- Writes the segments that were changed, and the lists that they are found in.
function Book:flush_segments()
  for number, segment in pairs(self.segments) do
    if segment and segment.is_changed then
      local name, share = tostring(number), segment.share
      self:table(Hash, 'segments'):put(name, pack(SEGMENT, share.space.number, share.number,
        share.space.namespace, share.tenant, segment.state, segment.until_s, segment.slot_count, segment.pages, segment.reserved,
        segment.graced, segment.ages))
      self:write_totals(share)
      local lists = self:lists_of(segment)
      for list, score in pairs(lists) do
        if score ~= segment.lists[list] then
          self:table(Sorted, list):put(name, score)
        end
      end
      segment.lists, segment.is_changed = lists, false
    end
  end
end

-- Numbers of the segments of a list whose score is at most `score_max`, in order.
function Book:listed(list, score_max)
  self:flush_segments()
  local numbers = {}
  for index, name in ipairs(self:table(Sorted, list):lowest(score_max, -1)) do
    numbers[index] = tonumber(name)
  end
  table.sort(numbers)
  return numbers
end

-- All segments, by number.
function Book:all_segments()
  self:flush_segments()
  local segments = {}
  for index, name in ipairs(self:table(Hash, 'segments'):fields()) do
    segments[index] = self:segment(tonumber(name))
  end
  table.sort(segments, function(one, other) return one.number < other.number end)
  return segments
end

function Book:bits(segment)
  segment.bit_table = segment.bit_table or self:table(Bits, 'bits:' .. segment.number)
  return segment.bit_table
end

function Book:keys(segment)
  segment.key_table = segment.key_table or self:table(Keys, 'keys:' .. segment.number)
  return segment.key_table
end

-- Reserved and graced slots of a segment: 'R' and a reservation, or 'G' and its end.
function Book:busy(segment)
  segment.busy_table = segment.busy_table or self:table(Hash, 'busy:' .. segment.number)
  return segment.busy_table
end

function Book:segment_count()
  self:flush_segments()
  self:table(Hash, 'segments'):flush()
  return call('HLEN', self.root .. ':segments')
end

function Book:segments_max()
  return floor(self.capacity_bytes / self.segment_bytes)
end

function Book:add_segment(number, share, state)
  local segment = self:segment(number)
  if not segment then
    segment = { number = number, share = share, slot_count = share.space.slot_count,
      pages = 0, reserved = 0, graced = 0, ages = 0, lists = {} }
    self.segments[number] = segment
    share.segments = share.segments + 1
  end
  self:set_state(segment, state, self.now_s + CREATION_S)
  self.next_segment = math.max(self.next_segment, number + 1)
  if state == READY then
    self:bits(segment):fill(segment.slot_count)
    self:keys(segment):fill(segment.slot_count)
  end
  return segment
end

-- Pages.

local function coldness(age, chunk_index)
  return age * CHUNKS + CHUNKS - 1 - math.min(chunk_index, CHUNKS - 1)
end

local function class_of(uses)
  local class = 0
  while uses > 1 and class < CLASS_COUNT - 1 do
    uses, class = floor(uses / 2), class + 1
  end
  return class
end

local function read_page(packed)
  local segment, slot, generation, age, chunk_index, parent, uses = unpack_from(PAGE, packed)
  return { segment = segment, slot = slot, generation = generation, age = age,
    chunk_index = chunk_index, parent = parent, uses = uses }
end

function Book:page(space, key)
  local packed = self:pages(space):get(key)
  return packed and read_page(packed)
end

function Book:write_page(space, key, page)
  self:pages(space):put(key, pack(PAGE, page.segment, page.slot, page.generation, page.age,
    page.chunk_index, page.parent, page.uses))
  local class, share = class_of(page.uses), self:segment(page.segment).share
  self:cold(share, class):put(pack(ADDRESS, page.segment, page.slot),
    coldness(page.age, page.chunk_index))
  share.heads[class] = nil
end

function Book:remove_cold(page)
  local class, share = class_of(page.uses), self:segment(page.segment).share
  self:cold(share, class):delete(pack(ADDRESS, page.segment, page.slot))
  share.heads[class] = nil
end

-- Marks a page and its ancestors as used now, and at least `uses` times. `is_use`: once more than
-- before.
function Book:lift(space, key, uses, is_use)
  local page = self:page(space, key)
  while page and not (page.age == self.age and page.uses >= uses) do
    local segment, class = self:segment(page.segment), class_of(page.uses)
    segment.ages = segment.ages + self.age - page.age
    segment.is_changed = true
    local own = page.uses
    if is_use and page.age < self.age then
      own = math.min(USES_MAX, own + 1)
    end
    uses = math.max(own, uses)
    if class_of(uses) ~= class then
      self:remove_cold(page)
    end
    page.age, page.uses = self.age, uses
    self:write_page(space, key, page)
    key = page.parent
    page = self:page(space, key)
  end
end

function Book:publish(space, key, page)
  local segment = self:segment(page.segment)
  page.age = self.age
  page.uses = math.min(USES_MAX, self:recall(space, key) + 1)
  self:write_page(space, key, page)
  self:keys(segment):put(page.slot, key)
  self:count(segment, 'pages', 1)
  segment.ages = segment.ages + self.age
  self:lift(space, page.parent, page.uses, false)
end

function Book:remove_page(space, key, page)
  local segment = self:segment(page.segment)
  self:pages(space):delete(key)
  self:remove_cold(page)
  self:count(segment, 'pages', -1)
  segment.ages = segment.ages - page.age
  self.counts.evicted = self.counts.evicted + 1
end

function Book:evict_page(space, key, page)
  self:remove_page(space, key, page)
  self:start_grace(self:segment(page.segment), page.slot, self.now_s + self.grace_s)
end

-- Slots.

function Book:timers()
  self.timer_table = self.timer_table or self:table(Sorted, 'timers')
  return self.timer_table
end

function Book:free(segment, slot)
  self:bits(segment):put(slot, true)
  segment.is_changed = true
end

function Book:start_grace(segment, slot, end_s)
  self:busy(segment):put(tostring(slot), 'G' .. pack('<d', end_s))
  self:timers():put(pack(TIMER, GRACE, segment.number, slot), end_s)
  self:count(segment, 'graced', 1)
end

-- nil: nobody holds it. `key`: NO_KEY before the first commit; `slices`: '1' where committed.
function Book:reservation(segment, slot)
  local packed = self:busy(segment):get(tostring(slot))
  if not packed or byte(packed) ~= byte('R') then
    return nil
  end
  local generation, lease_end_s, key = unpack_from('<c16dc32', packed, 2)
  return { generation = generation, lease_end_s = lease_end_s, key = key,
    slices = sub(packed, 58) }
end

function Book:write_reservation(segment, slot, held)
  self:busy(segment):put(tostring(slot),
    'R' .. pack('<c16dc32', held.generation, held.lease_end_s, held.key) .. held.slices)
end

function Book:end_reservation(segment, slot)
  self:busy(segment):delete(tostring(slot))
  self:timers():delete(pack(TIMER, LEASE, segment.number, slot))
  self:count(segment, 'reserved', -1)
end
