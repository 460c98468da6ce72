"""Codecs by their ids: what a reader knows, and what it refuses by name."""

import pytest

from flowstone.errors import UnsupportedFormatError
from flowstone.format.codec import CODECS, RAW, Codec, codec_of
from flowstone.table.chunks import CODEC_RAW


def test_raw_is_the_only_codec_and_needs_no_announcement() -> None:
    assert list(CODECS.values()) == [RAW]
    assert codec_of(CODEC_RAW) is RAW
    assert RAW.feature is None


def test_any_other_codec_is_a_critical_feature_by_its_name() -> None:
    assert Codec(1, "zstd").feature == "codec.zstd"


def test_ids_are_those_of_the_format() -> None:
    assert all(number == codec.id and 0 <= number < 128 for number, codec in CODECS.items())


def test_an_unknown_codec_is_refused_by_its_id() -> None:
    with pytest.raises(UnsupportedFormatError, match="codec 9, which this version cannot decode") as error:
        codec_of(9)
    assert error.value.facts["expected"] == "codec 0 (raw)"
