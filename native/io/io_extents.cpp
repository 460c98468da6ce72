#include "io/io_extents.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "codec/codecs.h"
#include "codec/planes.h"

namespace flowstone {
namespace {

void require(bool condition, std::size_t row, const char* rule) {
    if (!condition) throw std::invalid_argument("row " + std::to_string(row) + ": " + rule);
}

void check_layout(std::int64_t layout, const std::vector<Layout>& layouts, std::uint64_t length, std::size_t row) {
    if (layout == contiguous) return;
    require(layout >= 0 && static_cast<std::uint64_t>(layout) < layouts.size(), row,
            "layout is not an index into layouts");
    require(layouts[static_cast<std::size_t>(layout)].packed_bytes() == length, row,
            "length differs from its layout's");
}

void check_range(std::uint64_t offset, std::uint64_t length, std::size_t row) {
    require(offset <= file_bytes_max && length <= file_bytes_max - offset, row,
            "the range ends beyond the largest file");
}

/// Whether [first, first + count) lies inside [0, total), without overflow.
bool is_inside(std::uint64_t first, std::uint64_t count, std::uint64_t total) {
    return first <= total && count <= total - first;
}

void check_device(std::int32_t device, std::size_t devices, std::size_t row) {
    require(device == on_host || (device >= 0 && static_cast<std::size_t>(device) < devices), row,
            "device is not an index into devices");
}

/// Check that each device has digests or samples for its lazy rows, which have so many chunks; rows with deep layouts
/// need samples.
void check_watching(const WriteExtents& rows, std::span<const std::uint64_t> chunks,
                    std::span<const std::uint64_t> deep) {
    if (rows.samples.size() != chunks.size())
        throw std::invalid_argument("samples must have one entry for each device");
    if (!rows.digested.empty() && rows.digested.size() != chunks.size())
        throw std::invalid_argument("digested must have one entry for each device");
    for (std::size_t device = 0; device < chunks.size(); ++device) {
        const DeviceDigests* const digested = rows.digested.empty() ? nullptr : rows.digested[device];
        if (digested != nullptr && digested->runs() != chunks[device])
            throw std::invalid_argument("digested must match the devices' lazy rows");
        if (rows.samples[device].size() !=
            (deep[device] + (digested == nullptr ? chunks[device] : 0)) * lines_per_chunk)
            throw std::invalid_argument("samples must match the devices' lazy rows");
    }
}

/// Check the table of the bases of chunks.
void check_bases(const ReadExtents& rows, std::size_t file_count) {
    std::uint64_t next = 0;
    for (std::size_t i = 0; i < rows.bases.size(); ++i) {
        const ChunkBase& one = rows.bases[i];
        require(one.chunk >= next && one.chunk < rows.stored.size(), i,
                "bases must name stored chunks in ascending order");
        require(one.place.file < file_count, i, "a base's file is not an index into files");
        check_range(one.place.offset, one.place.length, i);
        require(may_be_base(one.place.codec), i, "a base chunk must not need a base itself");
        next = one.chunk + 1;
    }
}

/// Check the base of one stored chunk.
void check_base(const ReadExtents& rows, std::uint64_t stored, std::uint64_t data_bytes, std::size_t row) {
    const ChunkBase* const base = rows.base_of(stored);
    require((base != nullptr) == (rows.stored[stored].codec == codec_xor), row,
            "a chunk with codec 2 must have a base, and no other chunk may");
    if (base == nullptr) return;
    const std::uint32_t length = base->place.length;
    require(base->place.codec == codec_raw ? length == data_bytes : length != 0 && length < data_bytes, row,
            "a base must be as long as the chunk, or shorter if it is encoded");
}

/// Check the sources of a cast chunk of `data_bytes`: float32 chunks, each raw or encoded, none of them derived.
void check_cast(const ReadExtents& rows, const ChunkPlace& where, std::uint32_t data_bytes, std::size_t file_count,
                std::size_t row) {
    const std::uint64_t halves = cast::half_count(data_bytes);
    require(cast::is_element(where.length) && data_bytes % 2 == 0, row,
            "a cast chunk has an unknown element type, or half an element");
    require(is_inside(where.offset, halves, rows.stored.size()), row, "a cast chunk's source is beyond the digests");
    for (std::uint64_t half = 0; half < halves; ++half) {
        const ChunkPlace& source = rows.source_of(where, half);
        const std::uint64_t bytes = 2 * std::min(cast::half_bytes, data_bytes - half * cast::half_bytes);
        require(source.file < file_count, row, "a stored chunk's file is not an index into files");
        check_range(source.offset, source.length, row);
        require(source.codec == codec_raw ? source.length == bytes
                                          : is_cast_source(source.codec) && source.length != 0 && source.length < bytes,
                row, "a cast chunk's source has the wrong length, or is itself derived");
        check_base(rows, where.offset + half, bytes, row);
    }
}

}  // namespace

std::uint64_t scattered(std::uint64_t number) {
    number += 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
    number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
    return number ^ (number >> 31);
}

std::uint64_t line_begin(std::uint64_t row_bytes, std::uint64_t line, std::uint64_t seed) {
    constexpr std::uint64_t line_bytes = sizeof(Line);
    constexpr std::uint64_t quarter = chunk_bytes / lines_per_chunk / line_bytes;  // in lines
    if (row_bytes <= line_bytes) return 0;
    const std::uint64_t lines = (row_bytes + line_bytes - 1) / line_bytes;
    const std::uint64_t low = std::min(line, (lines - 1) / quarter) * quarter;
    const std::uint64_t places = std::min(quarter, lines - low);
    const std::uint64_t place = ((scattered(scattered(seed) ^ line) >> 32) * places) >> 32;
    return std::min((low + place) * line_bytes, row_bytes - line_bytes);
}

void check_extents(const WriteExtents& rows, std::span<const std::uint64_t> file_bytes) {
    for (const std::uint64_t bytes : file_bytes)
        if (bytes % block_alignment_bytes != 0 || bytes > file_bytes_max)
            throw std::invalid_argument("a file's size must be a multiple of 4096");
    const WriteExtent* before = nullptr;
    std::vector<std::uint64_t> chunks(rows.devices.size(), 0), deep(rows.devices.size(), 0);  // of lazy rows
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteExtent& row = rows.rows[i];
        require(row.file < file_bytes.size(), i, "file is not an index into files");
        check_range(row.offset, row.length, i);
        require(row.end() <= file_bytes[row.file], i, "the range ends beyond the file's size");
        check_layout(row.layout, rows.layouts, row.length, i);
        check_device(row.device, rows.devices.size(), i);
        if (row.device != on_host && row.lazy)
            (rows.is_digestible(row) ? chunks : deep)[static_cast<std::size_t>(row.device)] += chunk_count(row.length);
        require(!row.gathered || (row.device != on_host && !row.lazy && row.layout == contiguous), i,
                "a gathered row must be on a device, not lazy, and contiguous");
        require(row.length == 0 || row.address != 0, i, "address is null");
        require(rows.supply == nullptr || (!row.lazy && row.device == on_host), i,
                "a row of a supply must be on the host, and not lazy");
        if (row.chunk != no_digest)
            require(is_inside(row.chunk, chunk_count(row.length), rows.chunks), i,
                    "its chunks are beyond the number of chunks");
        if (before != nullptr) {
            require(before->file <= row.file, i, "rows are not sorted by file");
            if (before->file == row.file)
                require(before->end() <= row.offset, i, "rows of a file are not sorted, or overlap");
        }
        before = &row;
    }
    if (rows.supply != nullptr && !rows.keeps_places())
        throw std::invalid_argument("rows of a supply cannot be encoded");
    check_watching(rows, chunks, deep);
}

void check_extents(const ReadExtents& rows, std::size_t file_count) {
    if (rows.rows.size() >= UINT32_MAX) throw std::invalid_argument("a job can have at most 2^32 - 2 rows");
    if (!rows.stored.empty() && rows.stored.size() != rows.digests.size())
        throw std::invalid_argument("stored must have one entry for each digest");
    check_bases(rows, file_count);
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const ReadExtent& row = rows.rows[i];
        require(row.file < file_count, i, "file is not an index into files");
        check_range(row.offset, row.length, i);
        check_layout(row.layout, rows.layouts, row.length, i);
        check_device(row.device, rows.devices.size(), i);
        require(row.first <= row.last && row.last <= chunk_count(row.length), i,
                "first..last are not chunks of the extent");
        if (row.first < row.last)
            require(is_inside(row.chunk, row.last, rows.digests.size()), i, "its chunks are beyond the digests");
        if (rows.stored.empty()) continue;
        for (std::uint64_t chunk = row.first; chunk < row.last; ++chunk) {
            const ChunkPlace& where = rows.stored[row.chunk + chunk];
            const std::uint32_t data_bytes = rows.data_bytes(row, chunk);
            if (where.codec == codec_cast) {
                check_cast(rows, where, data_bytes, file_count, i);
                continue;
            }
            require(where.file < file_count, i, "a stored chunk's file is not an index into files");
            check_range(where.offset, where.length, i);
            require(is_known_codec(where.codec), i, "a stored chunk has an unknown codec");
            check_base(rows, row.chunk + chunk, data_bytes, i);
            require(
                where.codec == codec_raw ? where.length == data_bytes : where.length != 0 && where.length < data_bytes,
                i, "a stored chunk must be as long as the chunk, or shorter if it is encoded");
        }
    }
}

std::vector<std::vector<std::uint32_t>> file_groups_of(const ReadExtents& rows) {
    std::vector<std::uint32_t> parent;  // a file of the same group; the first file of a group has itself
    std::vector<bool> used;
    const auto first_of = [&parent](std::uint32_t file) {
        while (parent[file] != file) file = parent[file] = parent[parent[file]];
        return file;
    };
    const auto use = [&](std::uint32_t file) {
        while (file >= used.size()) {
            parent.push_back(static_cast<std::uint32_t>(used.size()));
            used.push_back(false);
        }
        used[file] = true;
    };
    const auto join = [&](std::uint32_t a, std::uint32_t b) {
        const std::uint32_t first = first_of(a), other = first_of(b);
        parent[std::max(first, other)] = std::min(first, other);
    };
    for (const ReadExtent& row : rows.rows) {
        if (rows.stored.empty()) use(row.file);
        for (std::uint64_t chunk = row.first; !rows.stored.empty() && chunk < row.last; ++chunk) {
            const ChunkPlace place = rows.place_of(row, chunk);
            const std::uint64_t halves = place.codec == codec_cast ? cast::half_count(rows.data_bytes(row, chunk)) : 1;
            for (std::uint64_t half = 0; half < halves; ++half) {
                const std::uint64_t stored = place.codec == codec_cast ? place.offset + half : row.chunk + chunk;
                use(rows.stored[stored].file);
                if (half != 0) join(rows.stored[stored].file, rows.stored[stored - 1].file);
                const ChunkBase* const base = rows.base_of(stored);
                if (base == nullptr) continue;
                use(base->place.file);
                join(rows.stored[stored].file, base->place.file);
            }
        }
    }
    std::vector<std::vector<std::uint32_t>> groups;
    std::vector<std::size_t> group_at(used.size());
    for (std::uint32_t file = 0; file < used.size(); ++file) {
        if (!used[file]) continue;
        const std::uint32_t first = first_of(file);
        if (first == file) {
            group_at[file] = groups.size();
            groups.emplace_back();
        }
        groups[group_at[first]].push_back(file);
    }
    return groups;
}

}  // namespace flowstone
