-- The verbs of catalog/base.py over a `Book`, with arguments as catalog/valkey_records.py packs
-- them. A reply is a byte that says how it went, and what the verb has to say. A verb that fails
-- changes nothing; false as a second result says that nothing was changed either.

local OK, LOST, UNKNOWN_SPACE, NO_ROOM, OTHER_SIZES, BAD_SLICES, OTHER_SEGMENTS, OTHER_FORMAT =
  'K', 'L', 'U', 'N', 'D', 'B', 'S', 'F'
local PUBLISHED, PARTIAL, DUPLICATE, EXPIRED = 'P', 'A', 'D', 'E'
local FORMAT = '3' -- of the records; 1: the first; 2: uses of pages, ghosts, ages by 10 s; 3: shares
local COMMIT, COMMIT_BYTES = '<c32c32I4I4I4c16i4i4', 100
local FOUND, FOUND_BYTES = '<c32c32I4I4c16', 88
local NAMED_PAGE_BYTES = 48
local SLOT_BYTES = 24

-- What follows the first bytes of `packed`, in pieces of equal length.
local function pieces(packed, length)
  local found = {}
  for first = 1, #packed, length do
    found[#found + 1] = sub(packed, first, first + length - 1)
  end
  return found
end

local Verbs = {}

local function prefetch_commits(book, space, commits)
  local keys, slots = {}, {}
  for index, piece in ipairs(commits) do
    keys[index] = sub(piece, 1, KEY_BYTES)
    local number, slot = unpack_from('<I4I4', piece, 69)
    slots[number] = slots[number] or {}
    table.insert(slots[number], tostring(slot))
  end
  keys[#keys + 1] = sub(commits[1] or '', 33, 64)
  book:pages(space):prefetch(keys)
  for number, names in pairs(slots) do
    local segment = book:segment(number)
    if segment then
      book:busy(segment):prefetch(names)
    end
  end
end

-- Namespaces and pages.

function Verbs.attach(book, namespace, sizes, description)
  local space, moments = book:space(namespace), book:table(Sorted, 'attached')
  if not space then
    local number = book.next_space
    book.next_space = number + 1
    book:table(Hash, 'spaces'):put(namespace, pack('>I4', number) .. sizes .. description)
    book:table(Hash, 'learned'):put(tostring(number), pack(LEARNED, REACH_FIRST, 0, 0))
    moments:put(namespace, book.now_s)
    return OK
  end
  local slot_count, slot_bytes, slice_count, chunk_tokens = unpack_from('>I4dI4I4', sizes)
  if slot_count ~= space.slot_count or slot_bytes ~= space.slot_bytes
    or slice_count ~= space.slice_count or chunk_tokens ~= space.chunk_tokens then
    return OTHER_SIZES .. pack('>I4dI4I4', space.slot_count, space.slot_bytes,
      space.slice_count, space.chunk_tokens)
  end
  local attached_s = tonumber(call('ZSCORE', moments.key, namespace))
  if book.now_s < attached_s + ATTACH_STEP_S then
    return OK, false
  end
  moments:put(namespace, book.now_s)
  return OK
end

function Verbs.touch(book, namespace, packed)
  local space, is_changed = book:space(namespace), false
  if not space then
    return OK, false
  end
  local keys, pages = pieces(packed, KEY_BYTES), book:pages(space)
  pages:prefetch(keys)
  for _, key in ipairs(keys) do
    local row = pages.known[key]
    if row and unpack_from('<I4', row, 25) < book.age then
      book:lift(space, key, 1, true)
      is_changed = true
    end
  end
  return OK, is_changed
end

function Verbs.evict(book, namespace, packed)
  local space, before = book:space(namespace), book.counts.evicted
  if not space then
    return OK .. pack('<I4', 0), false
  end
  for _, named in ipairs(pieces(packed, NAMED_PAGE_BYTES)) do
    local key = sub(named, 1, KEY_BYTES)
    local page = book:page(space, key)
    if page and page.generation == sub(named, KEY_BYTES + 1) then
      book:evict_page(space, key, page)
    end
  end
  return OK .. pack('<I4', book.counts.evicted - before)
end

-- Slots.

-- One generation of 16 bytes for each slot that is wanted; as many as there are slots are used.
function Verbs.reserve(book, namespace, tenant, packed)
  local space = book:space(namespace)
  if not space then
    return UNKNOWN_SPACE
  end
  local share = book:share(space, tenant)
  local lease_s = unpack_from('<d', packed)
  local generations = pieces(sub(packed, 9), 16)
  local lease_end_s, said = book.now_s + lease_s, {}
  while share and #said < #generations do
    local name = book:table(Sorted, 'free:' .. share.number):lowest('+inf', 1)[1]
    if not name then
      break
    end
    local segment = book:segment(tonumber(name))
    for _, slot in ipairs(book:bits(segment):first(#generations - #said)) do
      local generation = generations[#said + 1]
      book:bits(segment):put(slot, false)
      book:write_reservation(segment, slot,
        { generation = generation, lease_end_s = lease_end_s, key = NO_KEY, slices = '' })
      book:timers():put(pack(TIMER, LEASE, segment.number, slot), lease_end_s)
      book:count(segment, 'reserved', 1)
      said[#said + 1] = pack('<I4I4', segment.number, slot) .. generation
    end
    book:flush_segments() -- a segment that has no more leaves the list
  end
  return OK .. table.concat(said)
end

function Verbs.commit(book, namespace, packed)
  local space = book:space(namespace)
  local commits = pieces(packed, COMMIT_BYTES)
  if not space then
    return OK .. rep(EXPIRED, #commits), false
  end
  prefetch_commits(book, space, commits)
  local verdicts = {}
  for index, piece in ipairs(commits) do
    local verdict = book:commit(space, piece)
    if verdict == BAD_SLICES then
      return BAD_SLICES
    end
    verdicts[index] = verdict
  end
  return OK .. table.concat(verdicts)
end

function Book:commit(space, piece)
  local key, parent, chunk_index, number, slot, generation, first, count =
    unpack_from(COMMIT, piece)
  local page, segment = self:page(space, key), self:segment(number)
  if page and page.generation == generation then
    return PUBLISHED
  end
  local held = segment and self:standing(space, segment, slot, generation, key)
  local is_complete = false
  if held then
    if count < 1 or first < 0 or first + count > space.slice_count then
      return BAD_SLICES
    end
    is_complete = self:add_slices(space, segment, slot, held, key, first, count)
  end
  if is_complete then
    self:end_reservation(segment, slot)
  end
  if page then
    self:lift(space, parent, page.uses, false)
    if is_complete then
      self:free(segment, slot)
      self.counts.duplicate = self.counts.duplicate + 1
    end
    return DUPLICATE
  end
  if not held then
    return EXPIRED
  end
  if not is_complete then
    return PARTIAL
  end
  self:publish(space, key, { segment = number, slot = slot, generation = generation,
    chunk_index = chunk_index, parent = parent })
  self.counts.published = self.counts.published + 1
  return PUBLISHED
end

-- The reservation that a commit is about, if it still stands.
function Book:standing(space, segment, slot, generation, key)
  local held = self:reservation(segment, slot)
  local stands = held
    and segment.share.space == space
    and segment.state == READY
    and held.generation == generation
    and held.lease_end_s > self.now_s
    and (held.key == NO_KEY or held.key == key)
  return stands and held or nil
end

-- Notes what is on storage. True if that is the whole page.
function Book:add_slices(space, segment, slot, held, key, first, count)
  if count == space.slice_count then
    return true
  end
  local slices = held.slices == '' and rep('0', space.slice_count) or held.slices
  held.slices = sub(slices, 1, first) .. rep('1', count) .. sub(slices, first + count + 1)
  held.key = key
  self:write_reservation(segment, slot, held)
  return not string.find(held.slices, '0', 1, true)
end

function Verbs.abort(book, packed)
  for _, piece in ipairs(pieces(packed, SLOT_BYTES)) do
    local number, slot, generation = unpack_from('<I4I4c16', piece)
    local segment = book:segment(number)
    local held = segment and book:reservation(segment, slot)
    if held and held.generation == generation then
      book:end_reservation(segment, slot)
      book:start_grace(segment, slot, book.now_s + book.grace_s)
    end
  end
  return OK
end

-- Segments.

function Verbs.grow(book, namespace, tenant)
  local space = book:space(namespace)
  if not space then
    return UNKNOWN_SPACE
  end
  local ledger = Ledger.new(book, book:segments_max(), book:segment_count(), 'segments')
  local refusal = ledger:refusal({ space = space, tenant = tenant })
  if refusal == OVER_QUOTA then
    book.counts.quota_refused = 1
    return OK .. refusal
  elseif refusal then
    return OK .. refusal, false
  end
  local number = book.next_segment
  book:add_segment(number, book:made_share(space, tenant), CREATING)
  return OK .. pack('<I4', number)
end

function Verbs.grown(book, packed)
  local number = unpack_from('<I4', packed)
  local segment = book:segment(number)
  if not segment or segment.state == EMPTIED then
    return OK .. '0', false
  end
  if segment.state == READY then
    return OK .. '1', false
  end
  book:add_segment(number, segment.share, READY)
  return OK .. '1'
end

function Verbs.shrunk(book, packed)
  local number = unpack_from('<I4', packed)
  local segment = book:segment(number)
  if not segment then
    return OK, false
  end
  book:empty(segment)
  book:forget_segment(segment)
  return OK
end

-- Pages of a segment come in one or several calls; `is_first` is that of a segment not yet known.
function Verbs.adopt(book, namespace, tenant, packed)
  local space = book:space(namespace)
  if not space then
    return UNKNOWN_SPACE
  end
  local number, is_first = unpack_from('<I4B', packed)
  local segment, taken = book:segment(number), 0
  if is_first == 1 then
    if segment then
      return OK .. pack('<I4B', 0, 0), false
    end
    if book:segment_count() >= book:segments_max() then
      return NO_ROOM
    end
    segment = book:add_segment(number, book:made_share(space, tenant), READY)
  elseif not segment or segment.share.space ~= space or segment.state ~= READY then
    return OK .. pack('<I4B', 0, 0), false
  end
  for _, piece in ipairs(pieces(sub(packed, 6), FOUND_BYTES)) do
    local key, parent, chunk_index, slot, generation = unpack_from(FOUND, piece)
    if slot < segment.slot_count and book:bits(segment):is_free(slot)
      and not book:page(space, key) then
      book:bits(segment):put(slot, false)
      book:publish(space, key, { segment = number, slot = slot, generation = generation,
        chunk_index = chunk_index, parent = parent })
      taken = taken + 1
    end
  end
  return OK .. pack('<I4B', taken, 1)
end

-- For each owner the length of its name, its name, what it is guaranteed, its maximum, its pages'
-- time to live.
function Verbs.set_quotas(book, packed)
  local known, told = book:quotas(), {}
  for _, piece in ipairs(pieces(packed, TOLD_BYTES)) do
    local length, name, guaranteed, maximum, ttl_s = unpack_from(TOLD, piece)
    local owner = sub(name, 1, length)
    told[owner] = { guaranteed = guaranteed, maximum = maximum, ttl_s = ttl_s,
      claimed_until_s = known[owner] and known[owner].claimed_until_s or 0 }
  end
  for owner in pairs(known) do
    if not told[owner] then
      book:table(Hash, 'quotas'):delete(owner)
    end
  end
  for owner, row in pairs(told) do
    book:write_quota(owner, row)
  end
  return OK
end
