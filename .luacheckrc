-- Scripts run in Redis's Lua 5.1, and are linted with their includes in place.
std = "lua51"
max_line_length = 120
read_globals = {"redis", "struct", "cmsgpack", "KEYS", "ARGV"}
-- An include may bring more functions than a script calls.
ignore = {"211/integer_text_less", "211/parse_count", "211/count_text", "211/is_integer_text", "211/keep", "211/LAST_STEP"}
