#include "rows.h"

#include <stdexcept>
#include <string>

#include "bounds.h"

namespace flowstone {
namespace {

void require(bool condition, std::size_t row, const char* rule) {
    if (!condition) throw std::invalid_argument("row " + std::to_string(row) + ": " + rule);
}

void check_layout(std::int64_t layout, const std::vector<Layout>& layouts, std::uint64_t length, std::size_t row) {
    if (layout == contiguous) return;
    require(layout >= 0 && static_cast<std::uint64_t>(layout) < layouts.size(), row, "layout is no index into layouts");
    require(layouts[static_cast<std::size_t>(layout)].packed_bytes() == length, row, "length is not its layout's");
}

void check_range(std::uint64_t offset, std::uint64_t length, std::size_t row) {
    require(offset <= file_bytes_max && length <= file_bytes_max - offset, row, "the range ends beyond any file");
}

/// Whether [first, first + count) lies inside [0, total), without overflow.
bool is_inside(std::uint64_t first, std::uint64_t count, std::uint64_t total) {
    return first <= total && count <= total - first;
}

}  // namespace

void check_rows(const WriteRows& rows, std::span<const std::uint64_t> file_bytes) {
    for (const std::uint64_t bytes : file_bytes)
        if (bytes % block_alignment_bytes != 0 || bytes > file_bytes_max)
            throw std::invalid_argument("a file's size must be a multiple of 4096");
    const WriteRow* before = nullptr;
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const WriteRow& row = rows.rows[i];
        require(row.file < file_bytes.size(), i, "file is no index into files");
        check_range(row.offset, row.length, i);
        require(row.end() <= file_bytes[row.file], i, "the range ends beyond the file's size");
        check_layout(row.layout, rows.layouts, row.length, i);
        require(row.length == 0 || row.address != 0, i, "address is null");
        if (row.chunk != no_digest) require(is_inside(row.chunk, chunk_count(row.length), rows.chunks), i, "chunk is beyond chunks");
        if (before != nullptr) {
            require(before->file <= row.file, i, "rows are not sorted by file");
            if (before->file == row.file) require(before->end() <= row.offset, i, "rows of a file are not sorted, or overlap");
        }
        before = &row;
    }
}

void check_rows(const ReadRows& rows, std::size_t file_count) {
    if (rows.rows.size() >= UINT32_MAX) throw std::invalid_argument("too many rows for one batch");
    for (std::size_t i = 0; i < rows.rows.size(); ++i) {
        const ReadRow& row = rows.rows[i];
        require(row.file < file_count, i, "file is no index into files");
        check_range(row.offset, row.length, i);
        check_layout(row.layout, rows.layouts, row.length, i);
        require(row.first <= row.last && row.last <= chunk_count(row.length), i, "first..last are no chunks of the extent");
        if (row.first < row.last) require(is_inside(row.chunk, row.last, rows.digests.size()), i, "chunk is beyond digests");
    }
}

}  // namespace flowstone
