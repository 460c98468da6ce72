// Threads near a part of the memory: what the system tells of it, in a folder made up here.
#include <pthread.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>

#include "tests/io_fixture.h"
#include "io/numa.h"

namespace flowstone {
namespace {

/// A folder as the system's.
struct Told {
    std::filesystem::path root =
        std::filesystem::temp_directory_path() / ("flowstone-numa-" + std::to_string(::getpid()));

    ~Told() { std::filesystem::remove_all(root); }
    void write(const std::string& folder, const std::string& name, const std::string& text) const {
        std::filesystem::create_directories(root / folder);
        std::ofstream(root / folder / name) << text << '\n';
    }
};

std::vector<int> numbers(const cpu_set_t& set) {
    std::vector<int> found;
    for (int one = 0; one < CPU_SETSIZE; ++one)
        if (CPU_ISSET(one, &set)) found.push_back(one);
    return found;
}

/// Runs on a worker: the processors that it may be on.
struct Look final : Task {
    std::promise<cpu_set_t> seen;
    void run(LiveAccess&) noexcept override { seen.set_value(own_processors()); }
};

std::vector<int> seen_by(Workers& workers) {
    Look look;
    std::future<cpu_set_t> seen = look.seen.get_future();
    workers.post(look);
    return numbers(seen.get());
}

}  // namespace

TEST_CASE("the processors of a node are what the system lists") {
    const Told told;
    told.write("node1", "cpulist", "1-3,8,10-11");
    told.write("node2", "cpulist", "");
    told.write("node3", "cpulist", "5,900-5000");
    CHECK(numbers(processors_of(1, told.root).value()) == std::vector<int>{1, 2, 3, 8, 10, 11});
    CHECK_FALSE(processors_of(2, told.root));
    CHECK_FALSE(processors_of(0, told.root));
    CHECK_FALSE(processors_of(-1, told.root));
    CHECK(numbers(processors_of(3, told.root).value()).back() == CPU_SETSIZE - 1);
}

TEST_CASE("the node of a device is what the system says") {
    const Told told;
    told.write("0000:3b:00.0", "numa_node", "1");
    told.write("0000:00:00.0", "numa_node", "-1");
    CHECK(node_of("0000:3b:00.0", told.root) == 1);
    CHECK(node_of("0000:00:00.0", told.root) == -1);
    CHECK(node_of("0000:99:00.0", told.root) == -1);
    CHECK(node_of("", told.root) == -1);
}

TEST_CASE("workers go to the processors of the node that their memory is on, as far as they are allowed there") {
    const std::vector<int> own = numbers(own_processors());
    Workers workers(1);
    CHECK(seen_by(workers) == own);
    const Told told;
    told.write("node0", "cpulist", std::to_string(own.front()));
    told.write("node1", "cpulist", std::to_string(own.back()) + "," + std::to_string(CPU_SETSIZE - 1));
    told.write("node2", "cpulist", std::to_string(CPU_SETSIZE - 1));
    workers.stay_near(-1, told.root);
    CHECK(seen_by(workers) == own);
    workers.stay_near(0, told.root);
    CHECK(seen_by(workers) == std::vector<int>{own.front()});
    workers.stay_near(1, told.root);  // though they are on others now
    CHECK(seen_by(workers) == std::vector<int>{own.back()});
    workers.stay_near(2, told.root);  // none of these is ours
    CHECK(seen_by(workers) == std::vector<int>{own.back()});
    CHECK(numbers(own_processors()) == own);
}

TEST_CASE("an engine's workers follow the arena that a job has") {
    const Sample sample = plain_sample(mib);
    IoFixture fixture(setups().front(), sample.file_bytes);
    CHECK(fixture.arena->node() == -1);
    const bool is_placed = fixture.arena->place(0) == 0;  // some containers refuse it
    CHECK(fixture.arena->node() == (is_placed ? 0 : -1));
    REQUIRE_FALSE(fixture.run(sample.rows)->fault());  // they may be on node 0, which is all of a machine that has one
}

}  // namespace flowstone
