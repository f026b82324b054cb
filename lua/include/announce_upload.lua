-- #include "notify"
-- #include "weight_text"

-- Tells waiting takers and reducers that the upload of a gradient begins, so that they add its parts up while they
-- arrive. header: its header, in hexadecimal.
local function announce_upload(record_key, gradient, place, weight, round_shape, header)
  notify(record_key .. ':wake',
    string.format('gradient=%s place=%s%s shape=%s header=%s', gradient, place,
      weight ~= 1 and '*' .. weight_text(weight) or '', round_shape, header))
end
