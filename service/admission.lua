-- Limits, slots, the choice of a worker and the way into its inbox, in one step; and the way out again.
--
--   ARGV[1]  MessagePack of one call: {op = "admit" | "release" | "renew" | "forget", ...}; see admission.py
--   ARGV[2]  "admit" only: the packed Job
--   returns  MessagePack
--
-- All keys are made here, so this needs one Redis server, not a cluster. Times are milliseconds of Redis' own clock;
-- a call may bring its own `now`, which only tests do.
--
--   pw:request:{id}            hash   attempt, worker, load, scopes: all that the request holds
--   pw:requests                zset   id -> end of its lease
--   pw:slots:{scope}           zset   id -> end of its lease
--   pw:window:{scope}          zset   id -> time of admission
--   pw:window:{scope}:tokens   hash   id -> tokens, and "sum" of all of them
--   pw:load:{worker}           counter of outstanding tokens
--   pw:beginnings              hash   how prompts begin, by its first digits -> all of it and the worker they went to

local WINDOW = 60000
local TOMBSTONE = 1000000000  -- an attempt above any: the request may never be admitted any more
local TOMBSTONE_MS = 60000
local EXPIRE_AT_ONCE = 50
local PAGE = 500

local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function request_key(id) return 'pw:request:' .. id end
local function slots_key(scope) return 'pw:slots:' .. scope end
local function times_key(scope) return 'pw:window:' .. scope end
local function tokens_key(scope) return 'pw:window:' .. scope .. ':tokens' end
local function load_key(worker) return 'pw:load:' .. worker end

local function unload(worker, tokens)
  if redis.call('EXISTS', load_key(worker)) == 1 and redis.call('DECRBY', load_key(worker), tokens) <= 0 then
    redis.call('DEL', load_key(worker))
  end
end

-- Correct what a request took from a window, where it still is in it.
local function spend(scope, id, tokens)
  local reserved = redis.call('HGET', tokens_key(scope), id)
  if reserved and tonumber(reserved) ~= tokens then
    redis.call('HSET', tokens_key(scope), id, tokens)
    redis.call('HINCRBY', tokens_key(scope), 'sum', tokens - tonumber(reserved))
  end
end

-- Give back all that a request holds; `used` tokens stay in the windows. Returns whether it held anything.
local function release(id, used)
  local held = redis.call('HMGET', request_key(id), 'worker', 'load', 'scopes')
  redis.call('ZREM', 'pw:requests', id)
  if not held[1] then return false end
  redis.call('DEL', request_key(id))
  for _, scope in ipairs(cmsgpack.unpack(held[3])) do
    redis.call('ZREM', slots_key(scope), id)
    spend(scope, id, used)
  end
  unload(held[1], tonumber(held[2]))
  return true
end

-- An expired lease is a request that nobody will bill: all of it is given back.
local function expire(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'pw:requests', '-inf', now, 'LIMIT', 0, EXPIRE_AT_ONCE)) do
    release(id, 0)
  end
end

-- Forget what has left the window (now - 60 s, now].
local function slide(scope, now)
  while true do
    local gone = redis.call('ZRANGEBYSCORE', times_key(scope), '-inf', now - WINDOW, 'LIMIT', 0, PAGE)
    if #gone == 0 then return end
    local sum = 0
    for _, tokens in ipairs(redis.call('HMGET', tokens_key(scope), unpack(gone))) do
      sum = sum + tonumber(tokens or 0)
    end
    redis.call('ZREM', times_key(scope), unpack(gone))
    redis.call('HDEL', tokens_key(scope), unpack(gone))
    redis.call('HINCRBY', tokens_key(scope), 'sum', -sum)
  end
end

local function usage(scope, now)
  slide(scope, now)
  local newest = redis.call('ZRANGE', times_key(scope), -1, -1, 'WITHSCORES')
  return {
    requests = redis.call('ZCARD', times_key(scope)),
    tokens = tonumber(redis.call('HGET', tokens_key(scope), 'sum') or 0),
    running = redis.call('ZCOUNT', slots_key(scope), '(' .. now, '+inf'),
    reset_ms = newest[2] and newest[2] + WINDOW - now or 0,
  }
end

-- How long until the oldest `count` entries have left the window.
local function until_requests(scope, count, now)
  local entry = redis.call('ZRANGE', times_key(scope), count - 1, count - 1, 'WITHSCORES')
  return entry[2] + WINDOW - now
end

-- How long until entries with at least `tokens` tokens have left the window.
local function until_tokens(scope, tokens, now)
  local at = 0
  while true do
    local page = redis.call('ZRANGE', times_key(scope), at, at + PAGE - 1, 'WITHSCORES')
    if #page == 0 then return WINDOW end
    for i = 1, #page, 2 do
      tokens = tokens - tonumber(redis.call('HGET', tokens_key(scope), page[i]) or 0)
      if tokens <= 0 then return page[i + 1] + WINDOW - now end
    end
    at = at + PAGE
  end
end

-- The refusal of one scope that lasts longest, or nil. retry_ms 0 says that waiting does not help.
local function refusal(scope, used, tokens, now)
  local found = nil
  local function refuse(cause, retry_ms)
    if not found or retry_ms > found.retry_ms then found = {cause = cause, retry_ms = retry_ms} end
  end
  if scope.tpm and tokens > scope.tpm then return {cause = 'tokens', retry_ms = 0} end
  if scope.concurrency and used.running >= scope.concurrency then refuse('concurrency', 1000) end
  if scope.rpm and used.requests >= scope.rpm then
    refuse('requests', scope.rpm == 0 and 0 or until_requests(scope.name, used.requests - scope.rpm + 1, now))
  end
  if scope.tpm and used.tokens + tokens > scope.tpm then
    refuse('tokens', until_tokens(scope.name, used.tokens + tokens - scope.tpm, now))
  end
  return found
end

local function check(call, used, now)
  local worst = nil
  for i, scope in ipairs(call.scopes) do
    local found = refusal(scope, used[i], call.tokens, now)
    if found and (not worst or found.retry_ms == 0 or (worst.retry_ms > 0 and found.retry_ms > worst.retry_ms)) then
      worst = found
      worst.scope = i - 1
    end
  end
  return worst
end

-- Where prompts that begin like this one went last. One entry for each four digits, so the hash stays bounded: who
-- begins differently with the same digits takes the place.
local function acquainted(call)
  local noted = call.beginning ~= '' and redis.call('HGET', 'pw:beginnings', string.sub(call.beginning, 1, 4))
  if noted and string.sub(noted, 1, #call.beginning) == call.beginning then
    return string.sub(noted, #call.beginning + 1)
  end
end

local function acquaint(call, worker)
  if call.beginning ~= '' then
    redis.call('HSET', 'pw:beginnings', string.sub(call.beginning, 1, 4), call.beginning .. worker)
  end
end

-- The living candidate with the fewest outstanding tokens; an idle one takes a request of any size. One that has seen
-- the prompt's beginning is taken while it has at most as much more to do as the prompt is long.
local function choose(call)
  local best, least, living = nil, nil, false
  local known, known_load = acquainted(call), nil
  for _, candidate in ipairs(call.candidates) do
    if redis.call('EXISTS', 'pw:lease:' .. candidate.worker) == 1 then
      living = true
      local load = tonumber(redis.call('GET', load_key(candidate.worker)) or 0)
      local fits = load == 0 or load + call.tokens <= candidate.room
      if fits and (not best or load < least) then best, least = candidate.worker, load end
      if fits and candidate.worker == known then known_load = load end
    end
  end
  if known_load and known_load - least <= call.saves then best = known end
  return best, living and 'overloaded' or 'no_worker'
end

local function hold(call, worker, now)
  local before = redis.call('HMGET', request_key(call.id), 'worker', 'load')
  if before[1] then unload(before[1], tonumber(before[2])) end
  local names = {}
  for i, scope in ipairs(call.scopes) do
    names[i] = scope.name
    redis.call('ZADD', slots_key(scope.name), now + call.lease_ms, call.id)
  end
  redis.call('ZADD', 'pw:requests', now + call.lease_ms, call.id)
  redis.call('HSET', request_key(call.id), 'attempt', call.attempt, 'worker', worker, 'load', call.tokens,
    'scopes', cmsgpack.pack(names))
  redis.call('INCRBY', load_key(worker), call.tokens)
end

-- A later attempt is no new admission: it only moves what it holds.
-- Scopes without a rate keep no window: a rate that is set later starts counting then.
local function count(call, used, now)
  for i, scope in ipairs(call.scopes) do
    used[i].running = used[i].running + 1
    if scope.rpm or scope.tpm then
      redis.call('ZADD', times_key(scope.name), now, call.id)
      redis.call('HSET', tokens_key(scope.name), call.id, call.tokens)
      redis.call('HINCRBY', tokens_key(scope.name), 'sum', call.tokens)
      redis.call('PEXPIREAT', times_key(scope.name), now + 2 * WINDOW)
      redis.call('PEXPIREAT', tokens_key(scope.name), now + 2 * WINDOW)
      used[i].requests = used[i].requests + 1
      used[i].tokens = used[i].tokens + call.tokens
      used[i].reset_ms = WINDOW
    end
  end
end

local function admit(call, job, now)
  expire(now)
  local used = {}
  for i, scope in ipairs(call.scopes) do used[i] = usage(scope.name, now) end
  local before = redis.call('HMGET', request_key(call.id), 'attempt', 'worker')
  if before[1] and tonumber(before[1]) == TOMBSTONE then
    return {cause = 'forgotten', retry_ms = 0, scope = -1, used = used}
  end
  if before[1] and tonumber(before[1]) >= call.attempt then
    return {worker = before[2], used = used}  -- the reply to this very call was lost
  end
  if call.check then
    local found = check(call, used, now)
    if found then
      found.used = used
      return found
    end
  end
  local worker, cause = choose(call)
  if not worker then return {cause = cause, retry_ms = 1000, scope = -1, used = used} end
  hold(call, worker, now)
  acquaint(call, worker)
  if call.check then count(call, used, now) end
  redis.call('XADD', 'pw:inbox:' .. worker, '*', 'd', job)
  return {worker = worker, used = used}
end

-- Returns the requests whose lease is gone.
local function renew(call, now)
  expire(now)
  local missing = {}
  for _, id in ipairs(call.ids) do
    local scopes = redis.call('HGET', request_key(id), 'scopes')
    if scopes then
      redis.call('ZADD', 'pw:requests', now + call.lease_ms, id)
      for _, scope in ipairs(cmsgpack.unpack(scopes)) do
        redis.call('ZADD', slots_key(scope), now + call.lease_ms, id)
      end
    else
      missing[#missing + 1] = id
    end
  end
  return missing
end

-- Undo an admission whose outcome its owner never learnt, also one that is still on its way here.
local function forget(call)
  local worker = redis.call('HGET', request_key(call.id), 'worker')
  local held = release(call.id, 0)
  redis.call('HSET', request_key(call.id), 'attempt', TOMBSTONE)
  redis.call('PEXPIRE', request_key(call.id), TOMBSTONE_MS)
  return held and worker or ''
end

local call = cmsgpack.unpack(ARGV[1])
local now = call.now or clock()
local answer
if call.op == 'admit' then answer = admit(call, ARGV[2], now)
elseif call.op == 'release' then answer = release(call.id, call.used)
elseif call.op == 'renew' then answer = renew(call, now)
elseif call.op == 'forget' then answer = forget(call)
end
return cmsgpack.pack(answer)
