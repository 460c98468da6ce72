// Decoding, by codec. docs/FORMAT.md (Codecs) has the stored forms.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowstone {

/// Whether stored chunks may have that codec (codec_raw included).
bool is_known_codec(std::uint8_t codec);

/// Whether cast chunks may be rounded from a chunk with that codec, other than codec_raw.
bool is_cast_source(std::uint8_t codec);

/// Whether chunks with that codec may be the base of one with codec_xor.
bool may_be_base(std::uint8_t codec);

/// Decode a chunk to exactly `bytes` of `data`. Returns false if no encoder writes such bytes; `data` is then
/// undefined. `room` is a buffer of `bytes`. Hostile input is safe.
bool decode_chunk(std::uint8_t codec, const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes,
                  std::byte* room);

}  // namespace flowstone
