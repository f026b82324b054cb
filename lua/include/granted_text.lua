-- Returns the text of a round that is granted now, as granted_round reads it. granted: the reply that hands it out.
local function granted_text(granted, now, taker)
  local staleness = granted[5] == '' and '' or 'staleness=' .. granted[5] .. ' '
  local weight = granted[6] == '' and '' or 'weight=' .. granted[6] .. ' '
  return string.format('granted %s %s %.0f %s%s%s %s', granted[2], granted[3], now, staleness, weight, granted[4],
    taker)
end
