// CUDA's driver, by name: https://docs.nvidia.com/cuda/cuda-driver-api/
#include <dlfcn.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "device.h"

namespace flowstone {
namespace {

using Result = int;  // CUresult
using Address = unsigned long long;  // CUdeviceptr
using Stream = void*;  // CUstream
using Context = void*;  // CUcontext
using Callback = void (*)(Stream, Result, void*);

constexpr int relaxed = 2;        // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned portable = 1;  // CU_MEMHOSTREGISTER_PORTABLE: pinned for every context

/// The driver's functions that we use. Never unloaded: its threads run in it.
struct Driver {
    Result (*stream_context)(Stream, Context*);
    Result (*push_context)(Context);
    Result (*pop_context)(Context*);
    Result (*exchange_capture_mode)(int*);
    Result (*to_host)(void*, Address, std::size_t, Stream);
    Result (*from_host)(Address, const void*, std::size_t, Stream);
    Result (*add_callback)(Stream, Callback, void*, unsigned);
    Result (*synchronize)(Stream);
    Result (*pin)(void*, std::size_t, unsigned);
    Result (*unpin)(void*);
};

template <class Function> void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr) throw std::system_error(ENOSYS, std::generic_category(), std::string("libcuda.so.1 has no ") + name);
}

Driver load_driver() {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::system_error(ENOSYS, std::generic_category(), "libcuda.so.1");
    Driver driver{};
    find(library, "cuStreamGetCtx", driver.stream_context);
    find(library, "cuCtxPushCurrent_v2", driver.push_context);
    find(library, "cuCtxPopCurrent_v2", driver.pop_context);
    find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
    find(library, "cuMemcpyDtoHAsync_v2", driver.to_host);
    find(library, "cuMemcpyHtoDAsync_v2", driver.from_host);
    find(library, "cuStreamAddCallback", driver.add_callback);
    find(library, "cuStreamSynchronize", driver.synchronize);
    find(library, "cuMemHostRegister_v2", driver.pin);
    find(library, "cuMemHostUnregister", driver.unpin);
    return driver;
}

const Driver& driver() {
    static const Driver loaded = load_driver();
    return loaded;
}

/// Makes a device's context current on a thread that may have another one, and restores that at the end.
class Visit {
public:
    explicit Visit(Context context) {
        pushed_ = driver().push_context(context) == 0;  // if it fails, the following call fails too
        // Another thread may be recording a CUDA graph: our calls must not become part of it, nor be refused because of
        // it.
        (void)driver().exchange_capture_mode(&capture_mode_);
    }
    ~Visit() {
        (void)driver().exchange_capture_mode(&capture_mode_);
        Context context = nullptr;
        if (pushed_) (void)driver().pop_context(&context);
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

private:
    bool pushed_ = false;
    int capture_mode_ = relaxed;
};

/// The stream belongs to the code that made it, and outlives this.
class CudaDevice final : public Device {
public:
    CudaDevice(Stream stream, std::string name) : stream_(stream), name_(std::move(name)) {
        const Result error = driver().stream_context(stream_, &context_);
        if (error != 0) throw std::system_error(ENOSYS, std::generic_category(), "cuStreamGetCtx: " + describe(error));
    }

    int to_host(std::byte* target, std::uint64_t source, std::uint64_t bytes) override {
        const Visit visit(context_);
        return driver().to_host(target, source, bytes, stream_);
    }

    int from_host(std::uint64_t target, const std::byte* source, std::uint64_t bytes) override {
        const Visit visit(context_);
        return driver().from_host(target, source, bytes, stream_);
    }

    void then(Done done) override {
        const Visit visit(context_);
        auto* const waiting = new (std::nothrow) Done(std::move(done));
        if (waiting == nullptr) return done(driver().synchronize(stream_));
        // Not cuLaunchHostFunc: it is never called once the device has failed.
        const Result error = driver().add_callback(stream_, &call, waiting, 0);
        if (error == 0) return;
        (void)driver().synchronize(stream_);  // until no byte moves any more, whatever the result
        call(stream_, error, waiting);
    }

    bool pin(std::byte* memory, std::uint64_t bytes) override {
        const Visit visit(context_);
        return driver().pin(memory, bytes, portable) == 0;
    }

    void unpin(std::byte* memory) override {
        const Visit visit(context_);
        (void)driver().unpin(memory);  // fails only if the driver has released everything already
    }

    std::string name() const override { return name_; }

    /// Only the number: a callback must not call the driver for the name.
    std::string describe(int error) const override { return "CUDA error " + std::to_string(error); }

private:
    static void call(Stream, Result error, void* waiting) {
        const std::unique_ptr<Done> done(static_cast<Done*>(waiting));
        (*done)(error);
    }

    const Stream stream_;
    const std::string name_;
    Context context_ = nullptr;
};

}  // namespace

std::shared_ptr<Device> make_cuda_device(std::uintptr_t stream, std::string name) {
    return std::make_shared<CudaDevice>(reinterpret_cast<Stream>(stream), std::move(name));
}

}  // namespace flowstone
