// A GPU's primary context, and threads that visit it. For cuda.cpp and gather_kernel.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>

#include "gpu/device_cuda.h"

namespace flowstone {

inline std::string text_of(const CudaDriver& driver, CudaDriver::Result error) {
    const char* name = nullptr;
    if (driver.error_name(error, &name) == 0 && name != nullptr) return name;
    return "CUDA error " + std::to_string(error);
}

inline void check_call(const CudaDriver& driver, CudaDriver::Result error, const char* call) {
    if (error != 0)
        throw std::system_error(ENOSYS, std::generic_category(), std::string(call) + ": " + text_of(driver, error));
}

/// Makes a context current on a thread that may have another one, and restores the other one at the end.
class ContextScope {
public:
    ContextScope(const CudaDriver& driver, CudaDriver::Context context) : driver_(driver) {
        pushed_ = driver_.push_context(context) == 0;  // if it fails, the following call fails too
        // Another thread may be recording a graph: the driver would refuse a call that could be part of the graph, and
        // end that recording.
        (void)driver_.exchange_capture_mode(&capture_mode_);
    }
    ~ContextScope() {
        (void)driver_.exchange_capture_mode(&capture_mode_);
        CudaDriver::Context context = nullptr;
        if (pushed_) (void)driver_.pop_context(&context);
    }
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

private:
    const CudaDriver& driver_;
    bool pushed_ = false;
    int capture_mode_ = cuda_capture_relaxed;
};

/// A GPU's primary context, which torch also uses.
class PrimaryContext {
public:
    PrimaryContext(const CudaDriver& driver, int ordinal) : driver_(driver) {
        check_call(driver, driver.init(0), "cuInit");
        check_call(driver, driver.device_get(&device_, ordinal), "cuDeviceGet");
        check_call(driver, driver.retain_primary(&context_, device_), "cuDevicePrimaryCtxRetain");
    }
    ~PrimaryContext() { (void)driver_.release_primary(device_); }  // fails only if the driver has ended
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;

    const CudaDriver& driver() const { return driver_; }
    CudaDriver::Context get() const { return context_; }

    /// In lower case, as the system writes it.
    std::string pci_address() const {
        std::array<char, 32> text{};
        if (driver_.pci_address(text.data(), static_cast<int>(text.size()), device_) != 0) return {};
        std::transform(text.begin(), text.end(), text.begin(),
                       [](char one) { return one >= 'A' && one <= 'F' ? static_cast<char>(one + ('a' - 'A')) : one; });
        return text.data();
    }

private:
    const CudaDriver& driver_;
    int device_ = 0;
    CudaDriver::Context context_ = nullptr;
};

}  // namespace flowstone
