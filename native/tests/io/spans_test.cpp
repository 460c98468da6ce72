// What a job says of when its threads did what.
#include <algorithm>
#include <map>
#include <thread>

#include "tests/io_fixture.h"

namespace flowstone {
namespace {

std::map<Phase, std::uint64_t> bytes_by_phase(const std::vector<PhaseSpan>& spans) {
    std::map<Phase, std::uint64_t> bytes;
    for (const PhaseSpan& span : spans) bytes[span.phase] += span.bytes;
    return bytes;
}

void check_inside(const std::vector<PhaseSpan>& spans, std::int64_t begin_ns, std::int64_t end_ns) {
    for (const PhaseSpan& span : spans) {
        REQUIRE(span.begin_ns >= begin_ns);
        REQUIRE(span.end_ns >= span.begin_ns);
        REQUIRE(span.end_ns <= end_ns);
        REQUIRE(span.thread != 0);
    }
}

}  // namespace

TEST_CASE("spans of a job add up to its bytes, between its begin and its end") {
    for (const Setup& setup : setups()) {
        CAPTURE(setup.backend);
        CAPTURE(setup.direct);
        const Sample sample = random_sample(5, 24);
        IoFixture fixture(setup, sample.file_bytes);
        std::int64_t begin_ns = now_ns();
        const auto job = fixture.run(sample.rows);
        check_inside(job->spans(), begin_ns, now_ns());
        auto bytes = bytes_by_phase(job->spans());
        CHECK(bytes.size() == 2);
        CHECK(bytes[Phase::capture] == job->copied_bytes());
        CHECK(bytes[Phase::write] == job->done_bytes());

        std::vector<Memory> targets;
        begin_ns = now_ns();
        const auto load = fixture.run(read_back(sample, job->digests(), targets, 5));
        check_inside(load->spans(), begin_ns, now_ns());
        bytes = bytes_by_phase(load->spans());
        CHECK(bytes.size() == 2);
        CHECK(bytes[Phase::read] == load->requested_bytes());
        CHECK(bytes[Phase::deliver] == load->done_bytes());
    }
}

TEST_CASE("of more spans than there is room for, one for each phase holds all of the rest") {
    Spans spans;
    spans.expect(3);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&] {
            for (int j = 0; j < 100; ++j) spans.add(j % 2 == 0 ? Phase::capture : Phase::write, now_ns() - 1000, 7);
        });
    threads.clear();
    const std::vector<PhaseSpan> all = spans.all();
    CHECK(all.size() == 5);
    const auto bytes = bytes_by_phase(all);
    CHECK(bytes.at(Phase::capture) == 4 * 50 * 7);
    CHECK(bytes.at(Phase::write) == 4 * 50 * 7);
}

TEST_CASE("a job that was told to expect no spans loses no bytes of them") {
    Spans spans;
    spans.add(Phase::read, now_ns(), 3);
    spans.add(Phase::read, now_ns(), 4);
    REQUIRE(spans.all().size() == 1);
    CHECK(spans.all()[0].bytes == 7);
}

}  // namespace flowstone
