#include "codec/codecs.h"

#include <cstring>

#include "codec/encoder.h"
#include "codec/planes.h"
#include "codec/quantized.h"

namespace flowstone {

bool is_known_codec(std::uint8_t codec) {
    return codec == codec_raw || codec == codec_planes || codec == codec_xor || codec == codec_quantized;
}

bool may_be_base(std::uint8_t codec) { return codec == codec_raw || codec == codec_planes; }

bool is_cast_source(std::uint8_t codec) { return codec == codec_planes || codec == codec_xor; }

bool decode_chunk(std::uint8_t codec, const std::byte* stored, std::size_t length, std::byte* data, std::size_t bytes,
                  std::byte* room) {
    switch (codec) {
        case codec_raw:
            if (length != bytes) return false;
            std::memcpy(data, stored, bytes);
            return true;
        case codec_planes: return planes::decode(stored, length, data, bytes, room);
        case codec_quantized: return quantized::decode(stored, length, data, bytes);
        default: return false;
    }
}

}  // namespace flowstone
