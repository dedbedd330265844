-- The functions of the library: one for each verb. KEYS: the store's records, a hash; all other
-- keys begin with its name, which has a hash tag, so they lie in one slot of a cluster.

local OPERATION_S = 60 -- for how long a reply that must not be worked out twice is kept

-- `args`: catalog id; grace time, policy, then for each namespace its lookups and hits since the last
-- call; operation id or nothing; then the verb's own.
local function writing(verb)
  return function(keys, args)
    bind()
    local grace_s, is_adaptive = unpack_from('<dB', args[2])
    local book = Book.open(keys[1], args[1], grace_s, is_adaptive == 1)
    if not book then
      return LOST
    end
    local operation = args[3] ~= '' and keys[1] .. ':said:' .. args[3]
    local said = operation and call('GET', operation)
    if said then
      return said
    end
    book:add_lookups(sub(args[2], 10))
    local reply, is_changed = verb(book, unpack_all(args, 4))
    local status = sub(reply, 1, 1)
    if status == OK and (is_changed ~= false or book.counts.lookup > 0) then
      book:flush()
      if operation then
        call('SET', operation, reply, 'EX', OPERATION_S)
      end
    end
    return reply
  end
end

local function reading(verb)
  return function(keys, args)
    bind()
    if call('HGET', keys[1], 'catalog_id') ~= args[1] then
      return LOST
    end
    return verb(keys[1], unpack_all(args, 2))
  end
end

-- `args`: id for a new catalog or nothing, capacity, segment size. A store has one catalog: it is
-- made if it is not there and an id is given. The reply is its id.
local function open_records(keys, args)
  bind()
  local root, new_id, capacity_bytes, segment_bytes = keys[1], args[1], args[2], args[3]
  local found = call('HMGET', root, 'format', 'catalog_id', 'segment_bytes')
  if not found[1] then
    if new_id == '' then
      return LOST
    end
    call('HSET', root, 'format', FORMAT, 'catalog_id', new_id, 'capacity_bytes', capacity_bytes,
      'segment_bytes', segment_bytes, 'offset_s', 0, 'last_s', 0, 'next_segment', 0,
      'next_space', 0, 'next_share', 0, 'lookup', 0, 'hit', 0, 'published', 0, 'duplicate', 0, 'expired', 0,
      'evicted', 0, 'quota_refused', 0, 'quota_evicted', 0, 'lapsed', 0)
    return OK .. new_id
  end
  if found[1] ~= FORMAT then
    return OTHER_FORMAT .. found[1]
  end
  if found[3] ~= segment_bytes then
    return OTHER_SEGMENTS .. found[3]
  end
  call('HSET', root, 'capacity_bytes', capacity_bytes)
  return OK .. found[2]
end

local function register(name, callback, flags)
  redis.register_function({ function_name = '@LIBRARY@_' .. name, callback = callback,
    flags = flags })
end

-- Where the server's memory is full nothing new begins; what began ends, and gives memory back.
register('open', open_records, {})
register('attach', writing(Verbs.attach), {})
register('touch', writing(Verbs.touch), { 'allow-oom' })
register('evict', writing(Verbs.evict), { 'allow-oom' })
register('reserve', writing(Verbs.reserve), {})
register('commit', writing(Verbs.commit), { 'allow-oom' })
register('abort', writing(Verbs.abort), { 'allow-oom' })
register('grow', writing(Verbs.grow), {})
register('grown', writing(Verbs.grown), { 'allow-oom' })
register('shrunk', writing(Verbs.shrunk), { 'allow-oom' })
register('adopt', writing(Verbs.adopt), {})
register('set_quotas', writing(Verbs.set_quotas), {})
register('sweep', writing(Verbs.sweep), { 'allow-oom' })
register('lookup', reading(Readers.lookup), { 'no-writes' })
register('stats', reading(Readers.stats), { 'no-writes' })
register('hottest', reading(Readers.hottest), { 'no-writes' })
register('segments', reading(Readers.segments), { 'no-writes' })
register('audit', reading(Readers.audit), { 'no-writes' })
