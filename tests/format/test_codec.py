"""Codecs by their ids: what a reader knows. tests/stage/test_stored_chunks.py has what it refuses, by the tensor."""

from flowstone.format.codec import CODECS, RAW, Codec
from flowstone.table.chunks import CODEC_RAW


def test_raw_is_the_only_codec_and_needs_no_announcement() -> None:
    assert list(CODECS.values()) == [RAW]
    assert RAW.id == CODEC_RAW
    assert RAW.feature is None


def test_any_other_codec_is_a_critical_feature_by_its_name() -> None:
    assert Codec(1, "zstd").feature == "codec.zstd"


def test_ids_are_those_of_the_format() -> None:
    assert all(number == codec.id and 0 <= number < 128 for number, codec in CODECS.items())
