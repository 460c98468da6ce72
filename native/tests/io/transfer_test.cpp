// What results of system calls mean, without a system.
#include <doctest/doctest.h>

#include <limits.h>

#include <cerrno>
#include <memory>
#include <optional>

#include "bounds.h"
#include "io/transfer.h"

namespace flowstone {
namespace {

struct Bench {
    File file{3, std::make_shared<std::string>("somewhere"), 1};
    std::optional<Outcome> outcome;
    std::vector<std::byte> memory = std::vector<std::byte>(16384);

    std::unique_ptr<Op> op(Direction direction, std::uint64_t needed_bytes = 16384) {
        auto op = std::make_unique<Op>();
        op->direction = direction;
        op->file = &file;
        op->offset = 8192;
        op->needed_bytes = needed_bytes;
        for (std::size_t i = 0; i < 4; ++i) op->parts.push_back({memory.data() + 4096 * i, 4096});
        op->done = [this](Outcome result) { outcome = std::move(result); };
        return op;
    }
};

constexpr auto again = Transfer::Next::again;
constexpr auto finished = Transfer::Next::finished;

}  // namespace

TEST_CASE("a short count goes on where the system stopped") {
    Bench bench;
    Transfer transfer(bench.op(Direction::write), nullptr);
    CHECK(transfer.attempt().size() == 4);
    CHECK(transfer.settle(5000) == again);
    CHECK(transfer.offset() == 8192 + 5000);
    const auto list = transfer.attempt();
    CHECK(list.size() == 3);
    CHECK(list[0].iov_base == bench.memory.data() + 5000);
    CHECK(list[0].iov_len == 8192 - 5000);
    CHECK(transfer.settle(16384 - 5000) == finished);
    transfer.complete();
    CHECK_FALSE(bench.outcome->fault);
}

TEST_CASE("O_DIRECT goes on from the last boundary") {
    Bench bench;
    bench.file.alignment = 512;
    Transfer transfer(bench.op(Direction::write), nullptr);
    transfer.attempt();
    CHECK(transfer.settle(5000) == again);
    CHECK(transfer.offset() == 8192 + 4608);
    CHECK(transfer.pause_us() == 0);
}

TEST_CASE("a count below the alignment, again and again, is a fault") {
    Bench bench;
    bench.file.alignment = 512;
    Transfer transfer(bench.op(Direction::write), nullptr);
    transfer.attempt();
    int attempts = 1;
    while (transfer.settle(100) == again) ++attempts;
    CHECK(attempts == stalls_max + 1);
    transfer.complete();
    CHECK(bench.outcome->fault->error == EIO);
}

TEST_CASE("EAGAIN pauses longer and longer, then is a fault") {
    Bench bench;
    Transfer transfer(bench.op(Direction::read), nullptr);
    transfer.attempt();
    unsigned pause = 0;
    while (transfer.settle(-EAGAIN) == again) {
        CHECK(transfer.pause_us() >= pause);
        pause = transfer.pause_us();
    }
    CHECK(pause == 5000);
    transfer.complete();
    CHECK(bench.outcome->fault->operation == "read");
    CHECK(bench.outcome->fault->error == EAGAIN);
}

TEST_CASE("zero bytes are EIO for a write and the file's end for a read") {
    Bench bench;
    Transfer write(bench.op(Direction::write), nullptr);
    write.attempt();
    CHECK(write.settle(0) == finished);
    write.complete();
    CHECK(bench.outcome->fault->error == EIO);
    CHECK(bench.outcome->fault->offset == 8192);
    CHECK(bench.outcome->fault->length == 16384);

    Transfer read(bench.op(Direction::read, 9000), nullptr);
    read.attempt();
    CHECK(read.settle(8192) == again);
    CHECK(read.settle(0) == finished);
    read.complete();
    CHECK(bench.outcome->fault->operation == "end of file");
    CHECK(bench.outcome->fault->error == 0);
    CHECK(bench.outcome->fault->offset == 8192 + 8192);
    CHECK(bench.outcome->fault->length == 9000 - 8192);
}

TEST_CASE("a read is done when what it needs has arrived") {
    Bench bench;
    bench.file.alignment = 512;
    Transfer transfer(bench.op(Direction::read, 12300), nullptr);
    transfer.attempt();
    CHECK(transfer.settle(8192) == again);
    CHECK(transfer.settle(12300 - 8192) == finished);
    transfer.complete();
    CHECK_FALSE(bench.outcome->fault);
}

TEST_CASE("an attempt lists at most IOV_MAX parts") {
    Bench bench;
    auto op = bench.op(Direction::write);
    op->parts.assign(IOV_MAX + 10, {bench.memory.data(), 1});
    Transfer transfer(std::move(op), nullptr);
    CHECK(transfer.attempt().size() == IOV_MAX);
    CHECK(transfer.settle(IOV_MAX) == again);
    CHECK(transfer.attempt().size() == 10);
}

}  // namespace flowstone
