-- Shares: what one tenant has of one namespace. A share has a number from its first segment on.

-- nil: it has never had a segment.
function Book:share(space, tenant)
  local name = space.namespace .. tenant
  local share = self.shares[name]
  if share == nil then
    local packed = self:table(Hash, 'shares'):get(name)
    share = packed and self:read_share(space, tenant, unpack_from('>I4', packed))
    self.shares[name] = share
  end
  return share or nil
end

function Book:read_share(space, tenant, number)
  local segments, live, ready, pages, reserved, graced, soon_free =
    unpack_from(TOTALS, self:table(Hash, 'totals'):get(tostring(number)))
  return {
    space = space,
    tenant = tenant,
    number = number,
    segments = segments,
    live = live,
    ready = ready,
    pages = pages,
    reserved = reserved,
    graced = graced,
    soon_free = soon_free,
    heads = {},
    cold_tables = {},
  }
end

-- The share, which is made if it is not there.
function Book:made_share(space, tenant)
  local share, name = self:share(space, tenant), space.namespace .. tenant
  if not share then
    local number = self.next_share
    self.next_share, self.listed_shares = number + 1, nil
    self:table(Hash, 'shares'):put(name, pack('>I4', number))
    self:table(Hash, 'totals'):put(tostring(number), pack(TOTALS, 0, 0, 0, 0, 0, 0, 0))
    share = self:read_share(space, tenant, number)
    self.shares[name] = share
  end
  return share
end

function Book:write_totals(share)
  self:table(Hash, 'totals'):put(tostring(share.number), pack(TOTALS, share.segments, share.live,
    share.ready, share.pages, share.reserved, share.graced, share.soon_free))
end

function Book:forget_share(share)
  local name = share.space.namespace .. share.tenant
  self:table(Hash, 'shares'):delete(name)
  self:table(Hash, 'totals'):delete(tostring(share.number))
  self.shares[name], self.listed_shares = false, nil
end

function Book:all_shares()
  if not self.listed_shares then
    local listed = {}
    for _, name in ipairs(self:table(Hash, 'shares'):fields()) do
      local share = self:share(self:space(sub(name, 1, KEY_BYTES)), sub(name, KEY_BYTES + 1))
      listed[#listed + 1] = share
    end
    self.listed_shares = listed
  end
  return self.listed_shares
end

-- Those of one namespace.
function Book:shares_of(space)
  local found = {}
  for _, share in ipairs(self:all_shares()) do
    if share.space == space then
      found[#found + 1] = share
    end
  end
  return found
end

-- The pages of one class of uses, from 0 on, the coldest first.
function Book:cold(share, class)
  local tables = share.cold_tables
  tables[class] = tables[class] or self:table(Sorted, 'cold:' .. share.number .. ':' .. class)
  return tables[class]
end
