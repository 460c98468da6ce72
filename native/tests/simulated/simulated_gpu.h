// A simulated GPU in host memory, with a driver that refuses the same calls as CUDA's, for machines without a GPU.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/device_cuda.h"

namespace flowstone {

/// The driver of all SimulatedGpus of the process. As CUDA's documentation has it (cuda.h, 13.0):
///
/// - each call needs a context that is current on its thread (201 without);
/// - events are over once all before them in their stream is; one that was never recorded is over;
/// - memory is pinned once: a range that overlaps a pinned one is refused (712), and a copy from or to memory of which
/// a part is
///   pinned, or that goes on in another range, too (1);
/// - kernels reach memory that others have made, and is pinned as mapped, at another address, which has to be asked
/// for;
/// - of copies of several rows, strides are as long as a row, and not longer than 2^31 - 1 (1);
/// - a copy from the device into memory that is not pinned returns when it is over; one in the other direction takes
/// its
///   bytes with it;
/// - a call blocks while its stream has `queue_max` pieces of work;
/// - while a stream records a graph, calls that could be taken for a part of it are refused on threads that have not
///   exchanged their capture mode (900), and end that recording; work put into it is not executed, and a stream that
///   waits for an event of it records too;
/// - a kernel is launched by its text's entry, with as many parameters, of as many bytes, as that has, and no more
/// threads than it
///   takes; parameters are read at the call, what they point at when the stream comes there; it reaches the GPU's
///   memory and pinned host memory (700 elsewhere), at multiples of what it reads or writes at a time (716). Its code
///   is loaded at the first launch, which takes memory of the GPU;
/// - an error of a copy or kernel is the context's from then on: pending work is dropped, and every call returns it.
const CudaDriver& simulated_driver();

/// Its memory is mapped twice: at `address`, where an access kills the process, as with a pointer of a real device; and
/// at `inside`, for tests that act as kernels. One thread executes the work of its streams. Any thread.
class SimulatedGpu {
public:
    /// `delay`: of each copy. Throws std::system_error.
    SimulatedGpu(std::uint64_t bytes, std::chrono::microseconds delay);
    /// Streams and pinned memory have been given back.
    ~SimulatedGpu();
    SimulatedGpu(const SimulatedGpu&) = delete;
    SimulatedGpu& operator=(const SimulatedGpu&) = delete;

    static constexpr std::size_t queue_max = 1024;

    int ordinal() const { return ordinal_; }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(outside_); }
    std::byte* inside() const { return inside_; }

    /// Begin no copies, and no kernels that replace copies (in streams of the driver), until `hold(false)`.
    void hold(bool held);
    /// Make every copy fail from now on, except the next `copies`. A kernel that replaces copies counts as one.
    void fail_after(std::uint64_t copies);
    /// Refuse the next requested copy with error 1 (invalid value), which has no further effect.
    void refuse_next();
    std::uint64_t copies() const { return read(copies_); }
    std::uint64_t copied_bytes() const { return read(copied_bytes_); }
    /// Of several rows.
    std::uint64_t copies_of_rows() const { return read(copies_of_rows_); }
    /// By kernels.
    std::uint64_t packed_copies() const { return read(packed_copies_); }
    /// Of those, the most that one was of.
    std::uint64_t packed_blocks_max() const { return read(packed_blocks_max_); }
    /// Free memory of the GPU, from byte `begin` on: copies from there are refused, and kernels fail there.
    void unmap(std::uint64_t begin, std::uint64_t bytes);
    std::uint64_t pageable_copies() const { return read(pageable_); }
    std::uint64_t pinned_bytes() const { return read(pinned_bytes_); }
    /// Ranges that were pinned so far.
    std::uint64_t pins() const { return read(pins_made_); }
    /// Refuse to pin more than `bytes` in total, with error 2 (out of memory).
    void limit_pinned(std::uint64_t bytes);
    /// Calls to pin, refused ones too, that found copies in a stream.
    std::uint64_t pins_beside_copies() const { return read(pins_beside_copies_); }
    /// Recorded events that are not complete; the most at one time.
    std::size_t pending_events() const { return read(pending_); }
    std::size_t pending_events_max() const { return read(pending_max_); }

    /// The work of a training: its own streams, kernels, graphs. Handles are those of the driver.
    std::uintptr_t current() const { return current_; }
    void make_current(std::uintptr_t stream) { current_ = stream; }
    std::uintptr_t make_stream();
    /// While the stream records, the kernel becomes part of its graph instead.
    void launch(std::uintptr_t stream, std::function<void()> kernel);
    /// Pretend that all memory of the GPU is in use: calls that need memory are refused with error 2 (out of memory).
    void fill(bool is_full);
    /// Launched kernels of modules. Refuse modules, like a driver that does not understand them.
    std::uint64_t module_launches() const { return read(module_launches_); }
    /// Wait until these are done, unless they are held.
    void settle();
    void refuse_modules();
    /// Host memory that the driver gave out.
    std::uint64_t host_bytes() const { return read(host_bytes_); }
    std::uint64_t host_allocations() const { return read(host_allocations_); }
    /// Wait until all current work of the stream is done, or the GPU has failed.
    void synchronize(std::uintptr_t stream);
    /// `mode`: as CUstreamCaptureMode.
    void begin_capture(std::uintptr_t stream, int mode);
    /// Returns whether the recording was not ended by calls of other threads. `replay` executes its graph.
    bool end_capture(std::uintptr_t stream);
    void replay(std::uintptr_t stream);

    /// Flags and priority of the streams that were not created by `make_stream`.
    struct StreamFacts {
        unsigned flags;
        int priority;
    };
    std::vector<StreamFacts> streams() const;

private:
    friend struct SimulatedCalls;
    struct Item;
    struct Stream;
    struct Event;
    struct Module;

    template <class Number> Number read(const Number& number) const {
        const std::lock_guard lock(mutex_);
        return number;
    }
    void run(const std::stop_token& stop);
    Stream* next_ready_locked();
    void finish_locked(Item& item);
    void drop_all_locked(int error);
    void push(Stream& stream, Item item);
    int launch_module(Stream& stream, std::function<int()> kernel, bool is_module = true,
                      std::uint64_t copied_bytes = 0);
    std::byte* reach(std::uint64_t address, std::uint64_t bytes) const;
    template <class Act> int each_row(std::uint64_t table, std::uint32_t rows, Act act) const;
    int gather(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const;
    int digest(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const;
    template <class Act> int each_part(std::uint64_t table, std::uint32_t parts, Act act) const;
    int pack(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const;
    int digest_strided(std::uint64_t table, std::uint64_t out, std::uint32_t parts) const;
    std::uint64_t packed_bytes(std::uint64_t table, std::uint32_t parts) const;
    bool is_there(std::uint64_t begin, std::uint64_t bytes) const {
        return begin + bytes <= gone_.first || begin >= gone_.second;
    }
    int push_copy(Stream& stream, const DeviceCopy& copy);
    enum class PinState { none, whole, partly };
    PinState pinned_locked(const std::byte* memory, std::uint64_t bytes) const;

    const std::uint64_t bytes_;
    const std::chrono::microseconds delay_;
    int ordinal_ = 0;
    std::byte* inside_ = nullptr;
    void* outside_ = nullptr;
    mutable std::mutex mutex_;
    std::condition_variable_any changed_;
    std::list<std::unique_ptr<Stream>> streams_;
    std::list<std::unique_ptr<Event>> events_;
    std::list<std::unique_ptr<Module>> modules_;
    std::map<std::byte*, std::uint64_t> host_memory_;
    std::vector<std::function<int()>> graph_;
    std::uintptr_t current_ = 0;
    bool held_ = false;
    bool refuses_ = false;
    bool refuses_modules_ = false;
    bool is_full_ = false;
    std::uint64_t module_launches_ = 0;
    std::size_t modules_pending_ = 0;
    std::uint64_t host_bytes_ = 0;
    std::uint64_t host_allocations_ = 0;
    int error_ = 0;  // sticky
    std::uint64_t copies_ = 0;
    std::uint64_t copied_bytes_ = 0;
    std::uint64_t copies_of_rows_ = 0;
    std::uint64_t packed_copies_ = 0;
    std::uint64_t packed_blocks_max_ = 0;
    std::pair<std::uint64_t, std::uint64_t> gone_{0, 0};  // begin and end
    std::uint64_t pageable_ = 0;
    std::uint64_t copies_left_ = UINT64_MAX;
    std::uint64_t pinned_bytes_ = 0;
    std::uint64_t pinned_max_ = UINT64_MAX;
    std::uint64_t pins_made_ = 0;
    std::uint64_t pins_beside_copies_ = 0;
    std::size_t pending_ = 0;
    std::size_t pending_max_ = 0;
    std::vector<std::pair<std::byte*, std::uint64_t>> pins_;  // all mapped
    std::jthread thread_;
};

}  // namespace flowstone
