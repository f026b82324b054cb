-- #include "is_weight"
-- #include "weight_text"
-- #include "round_weight"

-- Returns what record.total_weight becomes with one more gradient; or nil and a reply if that cannot be.
local function add_weight(record, weight)
  if record.total_weight > 0 and record.num_accumulated == 0 then
    return nil, {'corrupt', 'total_weight', weight_text(record.total_weight)}
  elseif weight == 1 and record.total_weight == 0 then
    return 0
  end
  local total = round_weight(record) + weight
  if not (is_weight(weight) and is_weight(total)) then
    return nil, {'unweighable', weight_text(weight), weight_text(total)}
  end
  return total
end
