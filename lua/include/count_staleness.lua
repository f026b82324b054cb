-- #include "round_staleness"
-- #include "count_text"

-- Returns the text that read_staleness reads, with one more gradient; or nil and a reply if it is not redisacc's. It
-- searches for plain text, because patterns took five times as long in the longest text.
local function count_staleness(record_key, record, staleness)
  local text, refusal = read_staleness(record_key, record)
  if not text then
    return nil, refusal
  end
  local listed, pair = ',' .. text .. ',', string.format(',%.0f:', staleness)
  local _, last = string.find(listed, pair, 1, true)
  if not last then
    return (text == '' and '' or text .. ',') .. string.sub(pair, 2) .. '1'
  end
  local stop = string.find(listed, ',', last + 1, true)
  local count = parse_count(string.sub(listed, last + 1, stop - 1))
  if not count then
    return nil, {'corrupt', 'staleness', string.sub(text, 1, 64)}
  end
  return string.sub(listed, 2, last) .. count_text(count + 1) .. string.sub(listed, stop, -2)
end
