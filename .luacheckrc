-- Scripts run in Redis's Lua 5.1, and are linted with their includes in place.
std = "lua51"
max_line_length = 120
read_globals = {"redis", "struct", "cmsgpack", "KEYS", "ARGV"}
-- An include may define a function that the script doesn't call.
-- An include in a block has the names of its own parameters, whatever the code around the block calls its variables.
ignore = {"211/count_text", "43"}
