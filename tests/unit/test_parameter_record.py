"""The record of parameters, as anybody may have written it: what redisacc does not write is refused."""

import re

import pytest

import redisacc
from redisacc._format.keys import ParameterKeys
from redisacc._format.leaves import Schema
from redisacc._format.parameter_record import MAX_BLOB_BYTES, ParameterRecord, announced

SCHEMA = Schema.parse('{"a":"float32 [4,2]","b":"float32 [3]"}')
KEYS = ParameterKeys("w")
V = "0123456789abcdef"


def manifest_of(*, full=f"{V}-full:5:5:0-1", rows="", state="", slots="", since="0", step="5"):
    texts = ("1", "incarnation", V, step, full, rows, since, state, "0", "float32", "", slots, "")
    record = ParameterRecord.parse(KEYS, [text.encode() for text in texts])
    return record, record.manifest(SCHEMA)


def test_what_redisacc_writes_is_read_and_written_again():
    full = f"{V}-full:3:3:0-1 {V}-flat:5:4:1:1024"
    rows = f"{V}-rows:4:0=2 {V}-rows:5:0=4,1=3"
    slots = f"{V}-exp_avg:12:1 {V}-kept_full:64"
    # The flat blob comes first where an optimizer has published it.
    record, manifest = manifest_of(full=full, rows=rows, state=f"{V}-state:99", since="-4")
    assert (record.step, record.version, record.finished, record.encoding) == (5, V, False, "float32")
    fields = dict(zip(manifest.fields()[::2], manifest.fields()[1::2], strict=True))
    assert fields == {
        "full": full, "rows": rows, "rows_since": "-4", "state": f"{V}-state:99", "slots": "", "retired": "",
    }  # fmt: skip
    assert [leaves for _, leaves in manifest.shares(SCHEMA)] == [(0,), (1,)]
    _, manifest = manifest_of(full=f"{V}-flat:5:4:1:1024 {V}-full:3:3:0", slots=slots)
    assert [(blob.nbytes, blob.cut, blob.number) for blob in manifest.slots] == [(12, (12,), 1), (64, (), 0)]
    assert [blob.text for blob in record.retired(f"{V}-full:9 {V}-flat:12:3".encode())] == [
        f"{V}-full:9", f"{V}-flat:12:3",
    ]  # fmt: skip
    assert announced(KEYS, f"published step=5 blobs={V}-full:9,{V}-rows:3", 12) == [
        KEYS.part(f"{V}-full", 0), KEYS.part(f"{V}-rows", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("full", f"{V}:5:5:0-1"),
        ("full", f"{V}-full:5:5:0-2"),
        ("full", f"{V}-full:5:5:0"),
        ("full", f"{V}-full:5:6:0-1"),
        ("full", f"{V}-full:6:5:0-1"),
        ("full", f"{V}-full:5:{2**63}:0-1"),
        ("full", f"{V}-full:5:5:"),
        ("full", f"{V}-full:5:5:0-1:0"),
        ("full", f"{V}-full:5:5:0-1:1:1"),
        ("full", ""),
        ("full", " ".join([f"{V}-full:5:5:0-1"] * 10_001)),
        ("rows", f"{V}-rows:5:2=1"),
        ("rows", f"{V}-rows:5:0=5"),
        ("rows", f"{V}-rows:5:0=0"),
        ("rows", f"{V}-rows:5:0=1,0=1"),
        ("rows", f"{V}-rows:5:1=1,0=1"),
        ("rows", f"{V}-rows:5:0=1,"),
        ("rows", f"{V}-rows:5:0=1=1"),
        ("rows", f"{V}-rows:6:0=1"),
        ("rows", f"{V}-rows:5:0=1 {V}-rows:5:0=1"),
        ("rows_since", "none"),
        ("state", f"{V}-state:0"),
        ("state", f"{V}-state:{MAX_BLOB_BYTES + 1}"),
        ("state", f"{V}-state:9:0"),
        ("state", f"{V}-state:9:100001"),
        ("state", f"{V}-state:9 {V}-state:9"),
        ("slots", f"{V}-exp_avg:12:1"),
    ],
)
def test_what_redisacc_does_not_write(field, text):
    name = "since" if field == "rows_since" else field
    with pytest.raises(redisacc.CorruptDataError, match=re.escape(f"{KEYS.record}: {field} holds")):
        manifest_of(**{name: text})


@pytest.mark.parametrize("slots", [f"{V}-exp_avg:13:1", f"{V}-exp_avg:12:2", f"{V}-exp_avg:12", "exp_avg:12:1"])
def test_slots_that_do_not_fit_the_flat_blob(slots):
    with pytest.raises(redisacc.CorruptDataError, match="slots holds"):
        manifest_of(full=f"{V}-flat:5:4:1:1024 {V}-full:3:3:0", slots=slots)
