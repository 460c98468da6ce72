#include "tests/io_fixture.h"

#include <algorithm>
#include <cstring>

namespace flowstone {
namespace {

/// Eight bytes a time, by a generator of one multiplication (Knuth's, MMIX): under sanitizers, mt19937_64 took an
/// eighth of the time of all tests.
void fill_random(std::byte* at, std::uint64_t length, std::mt19937_64& random) {
    std::uint64_t drawn = random();
    const auto next = [&drawn] { return drawn = drawn * 6364136223846793005u + 1442695040888963407u; };
    for (; length >= sizeof drawn; at += sizeof drawn, length -= sizeof drawn) {
        next();
        std::memcpy(at, &drawn, sizeof drawn);
    }
    next();
    std::memcpy(at, &drawn, length);
}

void add_row(Sample& sample, std::mt19937_64& random, std::uint64_t offset, std::uint64_t length, std::uint64_t phase,
             bool strided) {
    const std::uint64_t stride = strided ? 3 : 1;
    Memory& memory = sample.memory.emplace_back(length * stride, phase);
    fill_random(memory.start(), length * stride, random);
    std::vector<std::byte>& stored = sample.stored.emplace_back(length);
    const std::byte* const from = memory.start();
    std::byte* const to = stored.data();
    if (!strided && length != 0) std::memcpy(to, from, length);
    for (std::uint64_t i = 0; strided && i < length; ++i) to[i] = from[i * stride];
    std::int64_t layout = contiguous;
    if (strided) {
        const std::uint64_t shape[] = {length};
        const std::int64_t strides[] = {static_cast<std::int64_t>(stride)};
        layout = static_cast<std::int64_t>(sample.rows.layouts.size());
        sample.rows.layouts.push_back(Layout::whole(1, shape, strides));
    }
    sample.rows.rows.push_back({offset, length, memory.address(), sample.rows.chunks, layout, 0});
    sample.rows.chunks += chunk_count(length);
}

/// Touched blocks hold the rows and zeros, the others keep their 0xEE.
void expect(Sample& sample) {
    sample.expected.assign(sample.file_bytes, std::byte{0xEE});
    for (const WriteExtent& row : sample.rows.rows)
        for (std::uint64_t at = block_floor(row.offset); row.length != 0 && at < row.end(); at += block_alignment_bytes)
            std::memset(sample.expected.data() + at, 0, block_alignment_bytes);
    for (std::size_t i = 0; i < sample.stored.size(); ++i)
        std::copy(sample.stored[i].begin(), sample.stored[i].end(),
                  sample.expected.begin() + static_cast<std::ptrdiff_t>(sample.rows.rows[i].offset));
}

}  // namespace

Sample random_sample(std::uint64_t seed, std::size_t row_count) {
    std::mt19937_64 random(seed);
    const auto upto = [&](std::uint64_t most) { return random() % (most + 1); };
    Sample sample;
    std::uint64_t at = upto(9000);
    for (std::size_t i = 0; i < row_count; ++i) {
        const std::uint64_t kind = upto(7);
        const bool is_large = kind >= 5;
        std::uint64_t length = kind == 0 ? 0 : upto(300);
        if (kind == 4) length = upto(100 * kib);
        if (is_large) length = 200 * kib + upto(3 * mib);
        if (is_large && upto(1)) at = block_ceil(at) + 64;
        const std::uint64_t phase = is_large && upto(2) != 0 ? at % block_alignment_bytes : upto(4095);
        add_row(sample, random, at, length, phase, kind == 3 || kind == 7);
        at += length + (upto(2) == 0 ? upto(12000) : 0);
    }
    sample.file_bytes = block_ceil(at) + 2 * block_alignment_bytes;
    expect(sample);
    return sample;
}

Sample plain_sample(std::uint64_t length, std::uint64_t phase) {
    std::mt19937_64 random(7);
    Sample sample;
    add_row(sample, random, phase, length, phase, false);
    sample.file_bytes = block_ceil(length + phase);
    expect(sample);
    return sample;
}

ReadExtents read_back(const Sample& sample, const std::vector<std::uint64_t>& digests, std::vector<Memory>& targets,
                      std::uint64_t seed) {
    std::mt19937_64 random(seed);
    ReadExtents rows{{}, {}, digests};
    for (const WriteExtent& row : sample.rows.rows) {
        const std::uint64_t phase = random() % 3 != 0 ? row.offset % block_alignment_bytes : random() % 4096;
        const Memory& target = targets.emplace_back(row.length, phase);
        std::memset(target.start(), 0x11, row.length);
        rows.rows.push_back(
            {row.offset, row.length, target.address(), row.chunk, 0, chunk_count(row.length), contiguous, 0});
    }
    return rows;
}

}  // namespace flowstone
