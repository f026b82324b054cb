-- Returns the staleness of a gradient, or nil if it is too stale to be accepted. It is the number of steps by which its
-- local_step is below the global step when it is admitted; 0 if it is not below.
local function accepted_staleness(record, local_step)
  if local_step == record.global_step then
    return 0
  end
  -- #include "integer_text_below"
  local staleness = integer_text_below(local_step, record.global_step)
  if staleness > record.max_staleness then
    return nil
  end
  return staleness
end
