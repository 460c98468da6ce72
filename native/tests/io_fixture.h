// A test fixture: one real file, one arena, one engine, and the expected content of the file.
#pragma once

#include <doctest/doctest.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "io/aligned.h"
#include "bounds.h"
#include "tests/bytes.h"
#include "io/engine.h"
#include "io/probe.h"

namespace flowstone {

inline constexpr std::uint64_t kib = 1024;
inline constexpr std::uint64_t mib = 1024 * kib;
inline constexpr double forever_s = std::numeric_limits<double>::infinity();

struct Setup {
    std::string backend;
    bool direct;  // O_DIRECT
};

/// Every backend on every kind of file that this machine supports; contract_test.cpp reports missing ones.
inline std::vector<Setup> setups() {
    std::vector<std::string> backends{"posix"};
    if (has_io_uring()) backends.push_back("io_uring");
    const bool has_direct = probe_direct(std::filesystem::temp_directory_path()) != 0;
    std::vector<Setup> all;
    for (const std::string& backend : backends) {
        all.push_back({backend, false});
        if (has_direct) all.push_back({backend, true});
    }
    return all;
}

/// A named temporary file of `bytes` bytes 0xEE; removed with the object.
class ScratchFile {
public:
    ScratchFile(bool direct, std::uint64_t bytes)
        : path_(std::filesystem::temp_directory_path() / "flowstone-test-XXXXXX") {
        fd_ = ::mkostemp(path_.data(), O_CLOEXEC);
        REQUIRE(fd_ >= 0);
        fill(bytes);
        const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0));
        REQUIRE(fd >= 0);
        const std::uint32_t alignment = direct ? probe_direct(std::filesystem::temp_directory_path()) : 1;
        file_ = std::make_shared<const File>(File{fd, std::make_shared<std::string>(path_), alignment});
    }
    ~ScratchFile() {
        ::close(file_->fd);
        ::close(fd_);
        ::unlink(path_.c_str());
    }
    ScratchFile(const ScratchFile&) = delete;
    ScratchFile& operator=(const ScratchFile&) = delete;

    const std::string& path() const { return path_; }
    const std::shared_ptr<const File>& file() const { return file_; }
    void truncate(std::uint64_t bytes) { REQUIRE(::ftruncate(fd_, static_cast<off_t>(bytes)) == 0); }
    void put(std::uint64_t offset, std::byte byte) { put(offset, std::vector<std::byte>{byte}); }
    void put(std::uint64_t offset, const std::vector<std::byte>& bytes) {
        REQUIRE(::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)) ==
                static_cast<ssize_t>(bytes.size()));
        REQUIRE(::fdatasync(fd_) == 0);
    }

    std::vector<std::byte> contents() const {
        std::vector<std::byte> bytes(std::filesystem::file_size(path_));
        REQUIRE(::pread(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
        return bytes;
    }

private:
    void fill(std::uint64_t bytes) {
        const std::vector<std::byte> fill(bytes, std::byte{0xEE});
        REQUIRE(::pwrite(fd_, fill.data(), bytes, 0) == static_cast<ssize_t>(bytes));
        REQUIRE(::fsync(fd_) == 0);
    }

    std::string path_;
    int fd_ = -1;
    std::shared_ptr<const File> file_;
};

/// Random memory for a row at a chosen phase.
class Memory {
public:
    Memory(std::uint64_t bytes, std::uint64_t phase)
        : memory_(allocate_aligned(bytes + phase + 1)), start_(memory_.get() + phase) {}
    std::byte* start() const { return start_; }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(start_); }

private:
    AlignedBytes memory_;
    std::byte* start_;
};

/// Rows of one file with their memory, and the expected content of the file.
struct Sample {
    WriteExtents rows;
    std::vector<Memory> memory;           // per row
    std::vector<std::byte> expected;      // the file
    std::vector<std::vector<std::byte>> stored;  // per row, packed
    std::uint64_t file_bytes = 0;
};

/// Rows of random kinds: empty, tiny and packed, unaligned, large in and out of phase, strided.
Sample random_sample(std::uint64_t seed, std::size_t row_count);
/// One contiguous row at the file's start.
Sample plain_sample(std::uint64_t length, std::uint64_t phase = 0);
/// Rows that read all extents of the sample into new memory at random phases, which `targets` gets.
ReadExtents read_back(const Sample& sample, const std::vector<std::uint64_t>& digests, std::vector<Memory>& targets,
                      std::uint64_t seed);

struct IoFixture {
    ScratchFile scratch;
    std::shared_ptr<Arena> arena;
    Engine engine;
    std::uint64_t file_bytes;

    IoFixture(const Setup& setup, std::uint64_t bytes, FaultInjector injector = nullptr, std::uint64_t blocks = 2)
        : scratch(setup.direct, bytes),
          arena(std::make_shared<Arena>(blocks * huge_page_bytes, huge_page_bytes)),
          engine({setup.backend, 4, mib, 2, std::move(injector)}),
          file_bytes(bytes) {}

    std::shared_ptr<WriteJob> start(const WriteExtents& rows) {
        return engine.write(arena, {{scratch.file(), file_bytes}}, std::make_shared<WriteExtents>(rows), {});
    }
    std::shared_ptr<ReadJob> start(const ReadExtents& rows, bool stop_at_bad = true) {
        return engine.read(arena, {scratch.file()}, std::make_shared<ReadExtents>(rows), {.stop_at_bad = stop_at_bad});
    }
    template <class Rows> auto run(const Rows& rows) {
        auto job = start(rows);
        REQUIRE(job->wait(forever_s));
        return job;
    }
};

}  // namespace flowstone
