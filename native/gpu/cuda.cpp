#include "gpu/device_cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/digest_kernel.h"
#include "gpu/gather_kernel.h"
#include "io/numa.h"
#include "gpu/pack_kernel.h"
#include "gpu/primary_context.h"
#include "io/thread_name.h"
#include "io/thread_start.h"

namespace flowstone {
namespace {

using Result = CudaDriver::Result;
using Stream = CudaDriver::Stream;
using Event = CudaDriver::Event;

// The shortest pause between queries of the first event: a window of 8 MiB takes 150 to 700 us on today's buses. Pauses
// grow if copies wait behind a long queue of training's work.
constexpr auto pause_min = std::chrono::microseconds(50);
constexpr auto pause_max = std::chrono::microseconds(1000);

template <class Function> void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr)
        throw std::system_error(ENOSYS, std::generic_category(), std::string("libcuda.so.1 has no ") + name);
}

/// The library is never unloaded, as its threads run in it.
CudaDriver load_driver() {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::system_error(ENOSYS, std::generic_category(), "libcuda.so.1");
    CudaDriver driver{};
    find(library, "cuInit", driver.init);
    find(library, "cuDeviceGet", driver.device_get);
    find(library, "cuDeviceGetPCIBusId", driver.pci_address);
    find(library, "cuDevicePrimaryCtxRetain", driver.retain_primary);
    find(library, "cuDevicePrimaryCtxRelease_v2", driver.release_primary);
    find(library, "cuCtxPushCurrent_v2", driver.push_context);
    find(library, "cuCtxPopCurrent_v2", driver.pop_context);
    find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
    find(library, "cuCtxGetStreamPriorityRange", driver.priority_range);
    find(library, "cuStreamCreateWithPriority", driver.stream_create);
    find(library, "cuStreamDestroy_v2", driver.stream_destroy);
    find(library, "cuStreamIsCapturing", driver.stream_capture_status);
    find(library, "cuStreamSynchronize", driver.stream_synchronize);
    find(library, "cuStreamWaitEvent", driver.stream_wait);
    find(library, "cuEventCreate", driver.event_create);
    find(library, "cuEventDestroy_v2", driver.event_destroy);
    find(library, "cuEventRecord", driver.event_record);
    find(library, "cuEventQuery", driver.event_query);
    find(library, "cuMemcpyDtoHAsync_v2", driver.to_host);
    find(library, "cuMemcpyHtoDAsync_v2", driver.from_host);
    find(library, "cuMemcpy2DAsync_v2", driver.copy_rows);
    find(library, "cuPointerGetAttribute", driver.pointer_attribute);
    find(library, "cuMemHostRegister_v2", driver.pin);
    find(library, "cuMemHostUnregister", driver.unpin);
    find(library, "cuMemHostGetDevicePointer_v2", driver.host_pointer);
    find(library, "cuMemHostAlloc", driver.host_alloc);
    find(library, "cuMemFreeHost", driver.host_free);
    find(library, "cuModuleLoadData", driver.module_load);
    find(library, "cuModuleUnload", driver.module_unload);
    find(library, "cuModuleGetFunction", driver.module_function);
    find(library, "cuLaunchKernel", driver.launch);
    find(library, "cuGetErrorName", driver.error_name);
    return driver;
}

/// A separate stream and its events, all created at the start, so that a full GPU cannot make a later save fail.
class SideStream {
public:
    explicit SideStream(const PrimaryContext& context) : context_(context), driver_(context.driver()) {
        const ContextScope visit(driver_, context_.get());
        try {
            int least = 0, greatest = 0;
            check_call(driver_, driver_.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
            check_call(driver_, driver_.stream_create(&stream, cuda_non_blocking, least), "cuStreamCreateWithPriority");
            for (Event& event : events)
                check_call(driver_, driver_.event_create(&event, cuda_event_without_timing), "cuEventCreate");
            check_call(driver_, driver_.event_create(&order, cuda_event_without_timing), "cuEventCreate");
            check_call(driver_, driver_.event_create(&early, cuda_event_without_timing), "cuEventCreate");
        } catch (...) {
            destroy();
            throw;
        }
    }
    ~SideStream() {
        const ContextScope visit(driver_, context_.get());
        destroy();
    }
    SideStream(const SideStream&) = delete;
    SideStream& operator=(const SideStream&) = delete;

    Stream stream = nullptr;
    std::array<Event, cuda_batches_max> events{};
    // A queued wait refers to what was recorded at that time, so these events may be recorded again at any time.
    Event order = nullptr;  // for `follow` and `lead`
    Event early = nullptr;  // recorded after the last early copies

private:
    /// These calls fail only if the driver has ended, or the GPU has failed.
    void destroy() {
        for (Event event : events)
            if (event != nullptr) (void)driver_.event_destroy(event);
        for (Event event : {order, early})
            if (event != nullptr) (void)driver_.event_destroy(event);
        if (stream != nullptr) (void)driver_.stream_destroy(stream);
    }

    const PrimaryContext& context_;
    const CudaDriver& driver_;
};

/// It has two threads. One makes the driver's calls, which may block if a queue is long; the other one queries events,
/// and finds errors. After a GPU failure every event, and thus every batch, ends with an error.
class CudaDevice final : public Device {
public:
    CudaDevice(const CudaDriver& driver, int ordinal, std::string name)
        : driver_(driver),
          name_(std::move(name)),
          context_(std::make_shared<PrimaryContext>(driver, ordinal)),
          own_(*context_) {
        memory_ = std::make_shared<LaunchMemory>(context_);
        pack_ = std::make_shared<PackKernel>(context_, memory_, own_.stream);
        gather_ = std::make_shared<GatherKernel>(context_, memory_, pack_, own_.stream);
        digest_ = std::make_shared<DigestKernel>(context_, memory_, gather_, own_.stream);
        free_.assign(own_.events.begin(), own_.events.end());
        threads_ = start_threads(
            2, [this](std::size_t number) { number == 0 ? submit_all() : poll_all(); }, [this] { close(); });
        // The driver's queues are in memory of the GPU's NUMA node.
        if (const auto processors = processors_of(node_of(pci_address())))
            keep_on(threads_, *processors, own_processors());
    }

    ~CudaDevice() override { close(); }  // then the threads are joined, once all batches have ended

    void submit(std::unique_ptr<CopyBatch> batch) noexcept override {
        const std::lock_guard lock(mutex_);
        ++under_way_;
        if (batch->early) ++early_under_way_;
        CopyBatch* const added = batch.get();
        (last_waiting_ == nullptr ? first_waiting_ : last_waiting_->next) = std::move(batch);
        last_waiting_ = added;
        changed_.notify_all();
    }

    int follow(std::uintptr_t stream) override { return order(as_stream(stream), own_.stream); }

    int lead(std::uintptr_t stream, Copies copies) override {
        if (copies == Copies::all) return under_way_ == 0 ? 0 : order(own_.stream, as_stream(stream));
        if (early_under_way_ == 0) return 0;
        if (is_recording(stream)) return cuda_capture_unsupported;
        const ContextScope visit(driver_, context_->get());
        return driver_.stream_wait(as_stream(stream), own_.early, 0);
    }

    bool is_recording(std::uintptr_t stream) override {
        const ContextScope visit(driver_, context_->get());
        int status = 0;
        // The query is refused for the null stream while another stream records: then the null stream must not be used
        // either.
        return driver_.stream_capture_status(as_stream(stream), &status) >= cuda_capture_unsupported || status != 0;
    }

    int gather(std::uintptr_t stream, std::span<const DeviceRun> runs,
               std::shared_ptr<const GatheredRuns>& gathered) override {
        if (is_recording(stream)) return cuda_capture_unsupported;
        return gather_->gather(as_stream(stream), runs, gathered);
    }

    bool packs() const override { return pack_->is_loaded(); }

    int digest(std::uintptr_t stream, std::span<const DeviceRun> runs,
               std::shared_ptr<const DeviceDigests>& digested) override {
        if (is_recording(stream)) return cuda_capture_unsupported;
        return digest_->digest(as_stream(stream), runs, digested);
    }

    void reserve_launches(const LaunchNeeds& needs, std::size_t times) override {
        const ContextScope visit(driver_, context_->get());
        const auto gathered = [](std::uint64_t runs, std::uint64_t strided, std::uint64_t bytes) {
            return runs == 0 ? 0 : GatherKernel::needed_bytes(runs, strided, bytes);
        };
        const std::uint64_t short_bytes = needs.short_runs * round_up(digested_by_host_max, gathered_alignment_bytes);
        std::vector<std::uint64_t> bytes;
        for (std::size_t i = 0; i < times; ++i)
            bytes.insert(
                bytes.end(),
                {gathered(needs.gathered_runs, needs.strided_runs, needs.gathered_bytes),
                 DigestKernel::needed_bytes(needs.digested_runs, needs.strided_digested_runs),
                 gathered(needs.short_runs, std::min(needs.short_runs, needs.strided_digested_runs), short_bytes)});
        if (needs.strided_runs != 0) bytes.insert(bytes.end(), cuda_batches_max, PackKernel::table_bytes);
        memory_->reserve(bytes);
    }

    int pin(std::byte* memory, std::uint64_t bytes) override {
        const ContextScope visit(driver_, context_->get());
        return driver_.pin(memory, bytes, cuda_pinned_for_all | cuda_pinned_mapped);
    }

    void unpin(std::byte* memory) override {
        const ContextScope visit(driver_, context_->get());
        (void)driver_.unpin(memory);  // fails only if the driver has ended, and released all memory
    }

    std::string name() const override { return name_; }
    std::string pci_address() const override { return context_->pci_address(); }
    std::string describe(int error) const override { return text_of(driver_, error); }

private:
    /// A batch in the stream, followed by an event.
    struct PendingBatch {
        std::unique_ptr<CopyBatch> batch;
        Event event = nullptr;
        std::shared_ptr<const LaunchLease> table = nullptr;  // the table of a kernel among the copies
    };

    static Stream as_stream(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

    /// Let work put into `later` from now on wait for the work that is in `earlier` now. One of both is the caller's
    /// stream.
    int order(Stream earlier, Stream later) {
        const Stream theirs = earlier == own_.stream ? later : earlier;
        if (is_recording(reinterpret_cast<std::uintptr_t>(theirs))) return cuda_capture_unsupported;
        const ContextScope visit(driver_, context_->get());
        const std::lock_guard lock(order_mutex_);
        const Result error = driver_.event_record(own_.order, earlier);
        return error != 0 ? error : driver_.stream_wait(later, own_.order, 0);
    }

    void close() {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }

    void submit_all() {
        name_this_thread("fs-copy");
        const ContextScope visit(driver_, context_->get());
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return closing_ || (first_waiting_ != nullptr && !free_.empty()); });
            if (first_waiting_ == nullptr) break;
            if (free_.empty()) {
                changed_.wait(lock, [this] { return !free_.empty(); });
                continue;
            }
            std::unique_ptr<CopyBatch> batch = std::move(first_waiting_);
            first_waiting_ = std::move(batch->next);
            if (first_waiting_ == nullptr) last_waiting_ = nullptr;
            const Event event = free_.back();
            free_.pop_back();
            lock.unlock();
            issue(std::move(batch), event);
            lock.lock();
        }
        submits_ = false;
        changed_.notify_all();
    }

    Result queue(const DeviceCopy& copy) {
        if (copy.rows > 1) {
            CudaCopy2D rows{};
            (copy.to_host ? rows.source_kind : rows.target_kind) = cuda_device_memory;
            (copy.to_host ? rows.target_kind : rows.source_kind) = cuda_host_memory;
            rows.source_host = rows.target_host = copy.host;  // the driver uses only the address of each side's kind
            rows.source_device = rows.target_device = copy.device;
            rows.source_pitch = copy.to_host ? copy.device_stride : copy.host_stride;
            rows.target_pitch = copy.to_host ? copy.host_stride : copy.device_stride;
            rows.width = copy.bytes;
            rows.height = copy.rows;
            return driver_.copy_rows(&rows, own_.stream);
        }
        return copy.to_host ? driver_.to_host(copy.host, copy.device, copy.bytes, own_.stream)
                            : driver_.from_host(copy.device, copy.host, copy.bytes, own_.stream);
    }

    /// Copy strided memory run by run: rows at strides that the driver accepts are one copy.
    Result queue_runs(const DeviceCopy& copy) {
        Result error = 0;
        copy.layout->for_runs(copy.begin, copy.begin + copy.bytes, [&](const StridedRuns& runs) {
            DeviceCopy rows{copy.host + runs.packed,
                            copy.device + static_cast<std::uint64_t>(runs.memory),
                            runs.bytes,
                            true,
                            runs.count,
                            runs.packed_stride,
                            static_cast<std::uint64_t>(runs.memory_stride)};
            const bool are_rows = runs.memory_stride >= static_cast<std::int64_t>(runs.bytes) &&
                std::max(rows.host_stride, rows.device_stride) <= device_stride_max;
            if (!are_rows) rows.rows = 1;
            for (std::uint64_t i = 0; i < runs.count && error == 0; i += rows.rows) {
                error = queue(rows);
                rows.host += rows.host_stride, rows.device += rows.device_stride;
            }
        });
        return error;
    }

    /// Queue all copies; a kernel, whose launches use `table`, copies strided memory.
    Result queue_all(std::span<const DeviceCopy> copies, std::shared_ptr<const LaunchLease>& table) {
        std::vector<DeviceCopy> packed;
        for (const DeviceCopy& copy : copies) {
            if (copy.layout != nullptr && !has_long_rows(*copy.layout)) {
                packed.push_back(copy);
                continue;
            }
            if (const Result error = copy.layout == nullptr ? queue(copy) : queue_runs(copy)) return error;
        }
        if (packed.empty()) return 0;
        if (const std::optional<PackKernel::Launch> launched = pack_->copy(own_.stream, packed)) {
            table = launched->table;
            return launched->error;
        }
        for (const DeviceCopy& copy : packed)
            if (const Result error = queue_runs(copy)) return error;
        return 0;
    }

    /// If a copy is refused, its batch ends with that error, after earlier copies are done.
    void issue(std::unique_ptr<CopyBatch> batch, Event event) {
        Result error = 0;
        std::shared_ptr<const LaunchLease> table;
        try {
            error = queue_all(batch->copies, table);
        } catch (const std::bad_alloc&) { error = cuda_out_of_memory; }
        Result recorded = driver_.event_record(event, own_.stream);
        if (batch->early && recorded == 0) recorded = driver_.event_record(own_.early, own_.stream);
        if (batch->queued) batch->queued();
        if (error == 0 && recorded == 0) {
            const std::lock_guard lock(mutex_);
            issued_[(first_issued_ + issued_count_++) % issued_.size()] = {std::move(batch), event, std::move(table)};
            changed_.notify_all();
            return;
        }
        (void)driver_.stream_synchronize(own_.stream);  // until no byte moves any more, whatever the result
        end(std::move(batch), event, error != 0 ? error : recorded);
    }

    void poll_all() {
        name_this_thread("fs-poll");
        const ContextScope visit(driver_, context_->get());
        auto pause = pause_min;
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return issued_count_ != 0 || !submits_; });
            if (issued_count_ == 0) return;
            const Event event = issued_[first_issued_].event;
            lock.unlock();
            const Result result = driver_.event_query(event);
            if (result == cuda_not_ready) {
                std::this_thread::sleep_for(pause);
                pause = std::min(pause * 2, pause_max);
                lock.lock();
                continue;
            }
            pause = pause_min;
            lock.lock();
            // All earlier work of the stream is done, too. An error is that of the GPU: no later event will complete.
            PendingBatch over = std::move(issued_[first_issued_]);
            first_issued_ = (first_issued_ + 1) % issued_.size();
            --issued_count_;
            lock.unlock();
            over.table = nullptr;  // before the batch ends, so that the next one can use it
            end(std::move(over.batch), over.event, result);
            lock.lock();
        }
    }

    void end(std::unique_ptr<CopyBatch> batch, Event event, Result error) {
        {
            const std::lock_guard lock(mutex_);
            free_.push_back(event);  // never allocates: it has capacity for all events
            --under_way_;
            if (batch->early) --early_under_way_;
            changed_.notify_all();
        }
        batch->done(error);  // last: the job may be destroyed by it
    }

    const CudaDriver& driver_;
    const std::string name_;
    const std::shared_ptr<const PrimaryContext> context_;
    SideStream own_;
    std::shared_ptr<LaunchMemory> memory_;
    std::shared_ptr<PackKernel> pack_;
    std::shared_ptr<GatherKernel> gather_;
    std::shared_ptr<DigestKernel> digest_;
    std::mutex order_mutex_;  // held from the record of an event to the wait for it
    std::atomic<std::size_t> under_way_{0};  // batches in progress
    std::atomic<std::size_t> early_under_way_{0};

    std::mutex mutex_;
    std::condition_variable changed_;
    std::unique_ptr<CopyBatch> first_waiting_;
    CopyBatch* last_waiting_ = nullptr;
    std::vector<Event> free_;
    std::array<PendingBatch, cuda_batches_max> issued_{};  // a ring, in the order of the stream
    std::size_t first_issued_ = 0;
    std::size_t issued_count_ = 0;
    bool closing_ = false;
    bool submits_ = true;
    std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace

const CudaDriver& cuda_driver() {
    static const CudaDriver loaded = load_driver();
    return loaded;
}

std::shared_ptr<Device> make_cuda_device(const CudaDriver& driver, int ordinal, std::string name) {
    return std::make_shared<CudaDevice>(driver, ordinal, std::move(name));
}

}  // namespace flowstone
