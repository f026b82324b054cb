-- #include "notify"
-- #include "weight_text"

-- Tells waiting takers and reducers that the upload of a gradient begins, so that they add its parts up while they
-- arrive. header: its header, in hexadecimal. lease_ms: for how long it keeps its place although nothing arrives; 0: as
-- long as any other one.
local function announce_upload(record_key, gradient, place, weight, round_shape, header, lease_ms)
  notify(record_key .. ':wake',
    string.format('gradient=%s place=%s%s shape=%s header=%s%s', gradient, place,
      weight ~= 1 and '*' .. weight_text(weight) or '', round_shape, header,
      lease_ms > 0 and string.format(' lease=%.0f', lease_ms) or ''))
end
