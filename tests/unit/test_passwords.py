"""Passwords in URLs."""

from support.rows import every_row

from redisacc._wire.connect import holds_password


@every_row(
    "url, holds",
    [
        ("redis://host:6379/0", False),
        ("redis://user@host:6379/0", False),
        ("redis://:secret@host", True),
        ("rediss://user:secret@host/3?ssl_cert_reqs=none", True),
        ("redis://user:se/c#r@t@host", True),
        ("unix://user:secret@/path", True),
        ("unix:///path?db=1", False),
        ("redis://host?password=secret", True),
        ("rediss://host?ssl_password=secret", True),
    ],
)
def test_passwords_are_found_in_urls(url, holds):
    assert holds_password(url) is holds
