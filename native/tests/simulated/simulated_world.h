// The shared state of simulated GPUs and their driver.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/simulated/simulated_gpu.h"

namespace flowstone::simulated {

// Of cuda.h.
inline constexpr int success = 0, invalid_value = 1, out_of_memory = 2, invalid_device = 101, invalid_context = 201,
                     invalid_handle = 400, invalid_text = 218, not_found = 500, illegal_address = 700,
                     already_pinned = 712, misaligned_address = 716, launch_failed = 719, captured_event = 907;
inline constexpr int global_mode = 0, local_mode = 1, relaxed_mode = 2;

/// Difference between the host's and the kernels' address of memory that the driver pinned, but did not allocate.
inline constexpr std::uint64_t pinned_skew = std::uint64_t{1} << 46;

struct World {
    std::mutex mutex;
    std::map<int, SimulatedGpu*> gpus;
    int next = 0;
    /// A recording: its stream, its mode, its thread, and whether it is still valid.
    struct Recording {
        int mode;
        std::thread::id thread;
        bool stands = true;
    };
    std::map<void*, Recording> recordings;
};

inline World& world() {
    static World one;
    return one;
}

/// Of a thread. Takes no memory: a test refuses that to threads that have just begun.
struct ContextStack {
    std::array<SimulatedGpu*, 16> held{};
    std::size_t count = 0;

    bool empty() const { return count == 0; }
    SimulatedGpu* back() const { return held[count - 1]; }
    void push_back(SimulatedGpu* gpu) { held.at(count++) = gpu; }
    void pop_back() { --count; }
};

inline thread_local ContextStack current_contexts;
inline thread_local int capture_mode = global_mode;

/// Whether a potentially unsafe call is refused on this thread; then it ends the recordings that refuse it.
inline bool is_prohibited() {
    if (capture_mode == relaxed_mode) return false;
    const std::lock_guard lock(world().mutex);
    bool found = false;
    for (auto& [stream, recording] : world().recordings) {
        const bool own = recording.thread == std::this_thread::get_id() && recording.mode != relaxed_mode;
        const bool others = capture_mode == global_mode && recording.mode == global_mode;
        if (!own && !others) continue;
        recording.stands = false;
        found = true;
    }
    return found;
}

}  // namespace flowstone::simulated

namespace flowstone {

struct SimulatedGpu::Event {
    SimulatedGpu* gpu;
    std::shared_ptr<bool> over = nullptr;  // of the last record: whether it is; null: there was none
    bool captured = false;
    void* recording = nullptr;  // the stream
};

/// Work of a stream: a copy if it has a target, otherwise a kernel, a record, or a wait.
struct SimulatedGpu::Item {
    std::byte* target = nullptr;
    const std::byte* source = nullptr;
    std::uint64_t bytes = 0;  // of a row
    std::uint64_t rows = 1;
    std::uint64_t target_stride = 0;
    std::uint64_t source_stride = 0;
    std::function<int()> kernel = nullptr;  // returns its error
    std::shared_ptr<bool> over = nullptr;  // of a record, also of the one that is waited for
    bool waits = false;
    bool is_module = false;  // a kernel of a module
    std::uint64_t copied_bytes = 0;  // of a kernel in the place of copies
    std::vector<std::byte> staged = {};
};

/// A module's text, as far as the driver has to understand it.
struct SimulatedGpu::Module {
    struct Entry {
        Module* module;
        std::string name;
        std::vector<std::size_t> parameters;  // bytes of each
        std::uint64_t threads_max = 1024;
    };
    bool is_loaded = false;  // at the first launch
    std::list<Entry> entries = {};
};

struct SimulatedGpu::Stream {
    SimulatedGpu* gpu;
    unsigned flags = 0;
    int priority = 0;
    bool others = false;  // not made by the driver's call
    bool busy = false;
    void* recording = nullptr;  // whose stream's graph it is part of
    std::deque<Item> queue = {};
};

}  // namespace flowstone
