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

constexpr unsigned portable = 1;  // CU_MEMHOSTREGISTER_PORTABLE: pinned for every context

/// The driver's functions that we use. Never unloaded: its threads run in it.
struct Driver {
    Result (*stream_context)(Stream, Context*);
    Result (*set_context)(Context);
    Result (*to_host)(void*, Address, std::size_t, Stream);
    Result (*from_host)(Address, const void*, std::size_t, Stream);
    Result (*add_callback)(Stream, Callback, void*, unsigned);
    Result (*synchronize)(Stream);
    Result (*pin)(void*, std::size_t, unsigned);
    Result (*unpin)(void*);
    Result (*error_name)(Result, const char**);
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
    find(library, "cuCtxSetCurrent", driver.set_context);
    find(library, "cuMemcpyDtoHAsync_v2", driver.to_host);
    find(library, "cuMemcpyHtoDAsync_v2", driver.from_host);
    find(library, "cuStreamAddCallback", driver.add_callback);
    find(library, "cuStreamSynchronize", driver.synchronize);
    find(library, "cuMemHostRegister_v2", driver.pin);
    find(library, "cuMemHostUnregister", driver.unpin);
    find(library, "cuGetErrorName", driver.error_name);
    return driver;
}

const Driver& driver() {
    static const Driver loaded = load_driver();
    return loaded;
}

/// The stream is its maker's, and outlives this.
class CudaDevice final : public Device {
public:
    CudaDevice(Stream stream, std::string name) : stream_(stream), name_(std::move(name)) {
        const Result error = driver().stream_context(stream_, &context_);
        if (error != 0) throw std::system_error(ENOSYS, std::generic_category(), "cuStreamGetCtx: " + describe(error));
    }

    int to_host(std::byte* target, std::uint64_t source, std::uint64_t bytes) override {
        enter();
        return driver().to_host(target, source, bytes, stream_);
    }

    int from_host(std::uint64_t target, const std::byte* source, std::uint64_t bytes) override {
        enter();
        return driver().from_host(target, source, bytes, stream_);
    }

    void then(Done done) override {
        enter();
        auto* const waiting = new Done(std::move(done));
        // Not cuLaunchHostFunc: that one is never called once the device has failed.
        const Result error = driver().add_callback(stream_, &call, waiting, 0);
        if (error == 0) return;
        (void)driver().synchronize(stream_);  // until nothing moves any more, whatever else is wrong
        call(stream_, error, waiting);
    }

    bool pin(std::byte* memory, std::uint64_t bytes) override {
        enter();
        return driver().pin(memory, bytes, portable) == 0;
    }

    void unpin(std::byte* memory) override {
        enter();
        (void)driver().unpin(memory);  // fails only when the driver has let go of everything before
    }

    std::string name() const override { return name_; }

    std::string describe(int error) const override {
        const char* known = nullptr;
        if (driver().error_name(error, &known) != 0 || known == nullptr) return "CUDA error " + std::to_string(error);
        return known;
    }

private:
    /// Contexts are per thread; setting the one that is current costs nothing. A failure is the next call's.
    void enter() const { (void)driver().set_context(context_); }

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
