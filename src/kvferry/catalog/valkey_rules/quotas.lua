-- What tenants and namespaces may have, in whole segments: as catalog/quotas.py says it.

local QUOTA, TOLD, TOLD_BYTES = '>I4I4dd', '<Bc32I4I4d', 49
local EVERYBODY = '*'
local WANTED_PART = 4
local BUDGET, OVER_QUOTA = 'B', 'Q'

-- By owner.
function Book:quotas()
  local found, rows = self:table(Hash, 'quotas'), {}
  for _, owner in ipairs(found:fields()) do
    local guaranteed, maximum, ttl_s, claimed_until_s = unpack_from(QUOTA, found:get(owner))
    rows[owner] = { guaranteed = guaranteed, maximum = maximum, ttl_s = ttl_s,
      claimed_until_s = claimed_until_s }
  end
  return rows
end

function Book:write_quota(owner, row)
  self:table(Hash, 'quotas'):put(owner,
    pack(QUOTA, row.guaranteed, row.maximum, row.ttl_s, row.claimed_until_s))
end

-- The shortest time to live that the owners of a share or the store say; nil: none does.
local function ttl_of(rows, share)
  local shortest
  for _, owner in ipairs({ share.space.namespace, share.tenant, EVERYBODY }) do
    local said = rows[owner] and rows[owner].ttl_s or 0
    if said > 0 and (not shortest or said < shortest) then
      shortest = said
    end
  end
  return shortest
end

local Ledger = {}
Ledger.__index = Ledger

-- `figure`: what of a share counts, `segments` or `live`. `total`: of all shares.
function Ledger.new(book, room_max, total, figure)
  local ledger = setmetatable({ book = book, room_max = room_max, total = total,
    rows = book:quotas(), held = {} }, Ledger)
  ledger.has_rows = next(ledger.rows) ~= nil
  if ledger.has_rows then
    for _, share in ipairs(book:all_shares()) do
      for _, owner in ipairs(ledger:owners(share)) do
        ledger.held[owner] = (ledger.held[owner] or 0) + share[figure]
      end
    end
  end
  return ledger
end

-- Those of a share that have a quota.
function Ledger:owners(share)
  local owners = {}
  for _, owner in ipairs({ share.space.namespace, share.tenant }) do
    if self.rows[owner] then
      owners[#owners + 1] = owner
    end
  end
  return owners
end

function Ledger:count(owner)
  return self.held[owner] or 0
end

function Ledger:add(share, by)
  self.total = self.total + by
  for _, owner in ipairs(self:owners(share)) do
    self.held[owner] = self:count(owner) + by
  end
end

-- Until then others keep out of what is missing to the owner.
function Ledger:claim(owner, until_s)
  self.rows[owner].claimed_until_s = until_s
  self.book:write_quota(owner, self.rows[owner])
end

function Ledger:claimed(owner)
  local row = self.rows[owner]
  local is_claimed = row.claimed_until_s > self.book.now_s
  return is_claimed and math.max(0, row.guaranteed - self:count(owner)) or 0
end

-- Why a share gets no further segment; nil: it does.
function Ledger:refusal(share)
  if self.total >= self.room_max then
    return BUDGET
  end
  return self:spare(share) == 0 and OVER_QUOTA or nil
end

-- How many segments a share may get as things are.
function Ledger:spare(share)
  local spare = self.room_max - self.total
  if self.has_rows then
    if #self:below(share) == 0 then
      for owner in pairs(self.rows) do
        if owner ~= share.space.namespace and owner ~= share.tenant then
          spare = spare - self:claimed(owner)
        end
      end
    end
    for _, owner in ipairs(self:owners(share)) do
      spare = math.min(spare, self.rows[owner].maximum - self:count(owner))
    end
  end
  return math.max(0, spare)
end

-- For how many slots a share may want room: catalog/quotas.py says why.
function Ledger:slots_max(share)
  if not self.has_rows then
    return math.huge
  end
  local top = self.room_max
  for owner, row in pairs(self.rows) do
    if owner ~= share.space.namespace and owner ~= share.tenant then
      top = top - math.min(self:count(owner), row.guaranteed)
    end
  end
  for _, owner in ipairs(self:owners(share)) do
    top = math.min(top, self.rows[owner].maximum)
  end
  return math.max(1, floor(math.max(1, top) * share.space.slot_count / WANTED_PART))
end

function Ledger:may_give(source, share)
  return self:may_lose(source, share) and self:gains(share, source)
end

-- Whether a share that may not grow may do so when `source` has one segment less.
function Ledger:gains(share, source)
  self:add(source, -1)
  local spare = self:spare(share)
  self:add(source, 1)
  return spare > 0
end

-- Owners of a share that have less than they are guaranteed.
function Ledger:below(share)
  local found = {}
  for _, owner in ipairs(self:owners(share)) do
    if self:count(owner) < self.rows[owner].guaranteed then
      found[#found + 1] = owner
    end
  end
  return found
end

-- Whether it is for a quota if pages are evicted for a share that may not grow.
function Ledger:is_bound(share)
  for _, owner in ipairs(self:owners(share)) do
    if self:count(owner) >= self.rows[owner].maximum then
      return true
    end
  end
  return self.total < self.room_max or #self:below(share) > 0
end

-- Whether the guarantees let a share lose a segment; `to`: nil, or whose owners lose nothing.
function Ledger:may_lose(share, to)
  for _, owner in ipairs(self:owners(share)) do
    local stays = to and (owner == to.space.namespace or owner == to.tenant)
    if not stays and self:count(owner) <= self.rows[owner].guaranteed then
      return false
    end
  end
  return true
end

function Ledger:is_above(owner)
  return self:count(owner) > self.rows[owner].maximum
end

-- Owners that have more than their maximum.
function Ledger:above()
  local found = {}
  for owner in pairs(self.rows) do
    if self:is_above(owner) then
      found[#found + 1] = owner
    end
  end
  table.sort(found)
  return found
end
