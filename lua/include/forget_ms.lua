-- A session may be forgotten after it has sent nothing for this long.
local FORGET_MS = 3600000
