"""Codecs by their ids: those that a reader knows. tests/stage/test_stored_chunks.py has those that it refuses."""

import numpy as np

from flowstone.format.codec import (
    CAST,
    CODECS,
    FEATURES,
    PLANES,
    QUANTIZED,
    RAW,
    XOR,
    Codec,
    allowed_codecs,
    features_of,
)
from flowstone.table.chunks import CODEC_RAW


def test_raw_needs_no_announcement_and_the_others_do() -> None:
    assert list(CODECS.values()) == [RAW, PLANES, XOR, QUANTIZED, CAST]
    assert RAW.id == CODEC_RAW
    assert RAW.feature is None
    assert {"codec.planes", "codec.xor", "codec.quantized", "codec.cast"} == FEATURES
    assert allowed_codecs(["delta"]) == {RAW.id}
    assert allowed_codecs(["delta", "codec.planes"]) == {RAW.id, PLANES.id}
    assert features_of(np.array([0, 0], np.uint8)) == ()
    assert features_of(np.array([0, 1, 0], np.uint8)) == ("codec.planes",)
    assert features_of(np.array([3, 1, 0], np.uint8)) == ("codec.planes", "codec.quantized")


def test_any_other_codec_is_a_critical_feature_by_its_name() -> None:
    assert Codec(1, "zstd").feature == "codec.zstd"


def test_ids_are_those_of_the_format() -> None:
    assert all(number == codec.id and 0 <= number < 128 for number, codec in CODECS.items())
