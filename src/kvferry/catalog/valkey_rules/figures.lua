-- What is only read: lookups and figures.

local LOOKUP_BATCH = 200

local Readers = {}

-- A hit of 24 bytes for each key.
function Readers.lookup(root, namespace, packed)
  local row = call('HGET', root .. ':spaces', namespace)
  if not row then
    return OK .. rep(NO_HIT, #packed / KEY_BYTES)
  end
  local pages, hits = root .. ':pages:' .. unpack_from('>I4', row), { OK }
  local count, batch_bytes = 1, LOOKUP_BATCH * KEY_BYTES
  for first = 1, #packed, batch_bytes do
    local keys, key_count = {}, 0
    for at = first, math.min(first + batch_bytes, #packed + 1) - 1, KEY_BYTES do
      key_count = key_count + 1
      keys[key_count] = sub(packed, at, at + KEY_BYTES - 1)
    end
    local found = call('HMGET', pages, unpack_all(keys))
    for index = 1, key_count do
      local page = found[index]
      hits[count + index] = page and sub(page, 1, 24) or NO_HIT
    end
    count = count + key_count
  end
  return table.concat(hits)
end

-- Names and numbers of the shares of a namespace, or of all.
local function share_numbers(root, namespace)
  local found, names, numbers = call('HGETALL', root .. ':shares'), {}, {}
  for index = 1, #found, 2 do
    if not namespace or sub(found[index], 1, KEY_BYTES) == namespace then
      names[#names + 1] = found[index]
      numbers[#numbers + 1] = unpack_from('>I4', found[index + 1])
    end
  end
  return names, numbers
end

-- The store's own fields, then for each namespace its name, record, lookups and hits; and for each
-- share its name and sums.
function Readers.stats(root)
  local meta = call('HMGET', root, 'capacity_bytes', 'segment_bytes', 'lookup', 'hit', 'published',
    'duplicate', 'expired', 'evicted', 'quota_refused', 'quota_evicted', 'lapsed')
  local spaces = call('HGETALL', root .. ':spaces')
  for index = 2, #spaces, 2 do
    local namespace = spaces[index - 1]
    spaces[index] = { spaces[index],
      unpack_all(call('HMGET', root .. ':lookups', namespace .. 'L', namespace .. 'H')) }
  end
  local shares, numbers = share_numbers(root)
  for index, name in ipairs(shares) do
    shares[index] = { name, call('HGET', root .. ':totals', tostring(numbers[index])) }
  end
  return { OK, meta, call('HLEN', root .. ':segments'), spaces, shares }
end

-- For each page its key, parent, chunk index and the minutes since its last use.
function Readers.hottest(root, namespace, count)
  local row = call('HGET', root .. ':spaces', namespace)
  if not row then
    return OK
  end
  local space, pages, found = unpack_from('>I4', row), {}, { OK }
  local last_s, offset_s = unpack_all(call('HMGET', root, 'last_s', 'offset_s'))
  local now_s = math.max(tonumber(last_s), server_now_s() + tonumber(offset_s))
  local function add(cold)
    for _, address in ipairs(call('ZREVRANGE', cold, 0, count - 1)) do
      local segment, slot = unpack_from(ADDRESS, address)
      local first = slot * KEY_BYTES
      local key = call('GETRANGE', root .. ':keys:' .. segment, first, first + KEY_BYTES - 1)
      local _, _, _, age, chunk_index, parent = unpack_from(PAGE,
        call('HGET', root .. ':pages:' .. space, key))
      pages[#pages + 1] = { key = key, parent = parent, age = age, chunk_index = chunk_index,
        address = address }
    end
  end
  local _, shares = share_numbers(root, namespace)
  for _, share in ipairs(shares) do
    for class = 0, CLASS_COUNT - 1 do
      add(root .. ':cold:' .. share .. ':' .. class)
    end
  end
  table.sort(pages, function(one, other)
    if one.age ~= other.age then
      return one.age > other.age
    elseif one.chunk_index ~= other.chunk_index then
      return one.chunk_index < other.chunk_index
    end
    return one.address > other.address
  end)
  for index = 1, math.min(tonumber(count), #pages) do
    local page = pages[index]
    found[#found + 1] = pack('<c32c32I4I4', page.key, page.parent, page.chunk_index,
      math.max(0, floor(now_s / AGE_STEP_S) - page.age))
  end
  return table.concat(found)
end

function Readers.segments(root)
  return { OK, call('HGETALL', root .. ':segments') }
end

local function audit_segment(root, number, packed)
  local space, share = unpack_from('>I4I4', packed)
  local names, pages = call('GET', root .. ':keys:' .. number) or '', {}
  for index, key in ipairs(pieces(names, KEY_BYTES)) do
    local page = call('HGET', root .. ':pages:' .. space, key)
    local segment, slot, _, age, chunk_index, uses
    if page then
      segment, slot, _, age, chunk_index, _, uses = unpack_from(PAGE, page)
    end
    if segment == tonumber(number) and slot == index - 1 then
      local cold = root .. ':cold:' .. share .. ':' .. class_of(uses)
      local score = call('ZSCORE', cold, pack(ADDRESS, segment, slot))
      local is_filed = score and tonumber(score) == coldness(age, chunk_index)
      pages[#pages + 1] = { key, page, is_filed and 1 or 0 }
    end
  end
  return { number, packed, call('GET', root .. ':bits:' .. number) or '',
    call('HGETALL', root .. ':busy:' .. number), pages }
end

-- Everything of the segments above `after`, of so many that they have about `slots_max` slots;
-- then whether these were the last, and how many records there are in all tables of each space.
function Readers.audit(root, after, slots_max)
  local found, numbers, rows = call('HGETALL', root .. ':segments'), {}, {}
  for index = 1, #found, 2 do
    local number = tonumber(found[index])
    if number > tonumber(after) then
      numbers[#numbers + 1], rows[number] = number, found[index + 1]
    end
  end
  table.sort(numbers)
  local segments, slot_count = {}, 0
  for index, number in ipairs(numbers) do
    if slot_count >= tonumber(slots_max) then
      break
    end
    segments[index] = audit_segment(root, tostring(number), rows[number])
    slot_count = slot_count + select(7, unpack_from(SEGMENT, rows[number]))
  end
  local spaces = call('HGETALL', root .. ':spaces')
  for index = 2, #spaces, 2 do
    local name = tostring(unpack_from('>I4', spaces[index]))
    local cold_count, _, shares = 0, share_numbers(root, spaces[index - 1])
    for _, share in ipairs(shares) do
      for class = 0, CLASS_COUNT - 1 do
        cold_count = cold_count + call('ZCARD', root .. ':cold:' .. share .. ':' .. class)
      end
    end
    spaces[index] = { call('HLEN', root .. ':pages:' .. name), cold_count,
      call('HGET', root .. ':learned', name) }
  end
  return { OK, #segments == #numbers and 1 or 0, segments, spaces,
    call('ZCARD', root .. ':timers'), call('HMGET', root, 'capacity_bytes', 'segment_bytes'),
    call('HGETALL', root .. ':quotas') }
end
