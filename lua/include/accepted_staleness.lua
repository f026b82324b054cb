-- Returns the staleness of a gradient, or nil if it is too stale to be accepted. It is the number of steps by which its
-- local_step is below the global step when it is admitted; 0 if it is not below. A later step than the round's may be
-- refused as well: a server that went back to older data has lost the weights of which that is the gradient.
local function accepted_staleness(record, request)
  if request.local_step == record.global_step then
    return 0
  end
  -- #include "integer_text_below"
  local staleness = integer_text_below(request.local_step, record.global_step)
  if staleness > record.max_staleness or (staleness == 0 and request.own_step) then
    return nil
  end
  return staleness
end
