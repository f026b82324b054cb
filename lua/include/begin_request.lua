-- #include "session_entry"

-- Decides whether a request is new. Returns the session's entry, to be written once the request is executed. For a
-- request that was executed before, returns nil, its first reply, and true; otherwise nil and the reply: {'superseded',
-- sequence}, {'lost', sequence}, or a reply of read_session.
local function begin_request(sessions_key, request)
  local entry, refusal = read_session(sessions_key, request.session)
  if not entry then
    return nil, refusal
  end
  if request.sequence == entry.sequence then
    -- The first reply was lost, and the session, or redis-py beneath it, sent the request again.
    return nil, {entry.outcome, entry.global_step, entry.num_accumulated}, true
  elseif request.sequence < entry.sequence then
    -- A dead connection kept an old copy, whose sender has long moved on. Executing it would count it twice.
    return nil, {'superseded', count_text(entry.sequence)}
  elseif request.acknowledged > entry.sequence then
    -- The server has lost an outcome that the session knows: it was restarted from older data, or failed over to a
    -- replica that lagged behind. The session must learn of it, and this is the last chance to notice.
    return nil, {'lost', count_text(entry.sequence)}
  end
  entry.sequence = request.sequence
  return entry
end
