// Copies by CUDA's driver.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "gpu/device.h"

namespace flowstone {

/// CUDA_MEMCPY2D: rows of `width` bytes between a side in host memory and one on the device.
struct CudaCopy2D {
    std::size_t source_x, source_y;
    int source_kind;
    const void* source_host;
    unsigned long long source_device;
    void* source_array;
    std::size_t source_pitch;
    std::size_t target_x, target_y;
    int target_kind;
    void* target_host;
    unsigned long long target_device;
    void* target_array;
    std::size_t target_pitch;
    std::size_t width, height;
};

/// The driver functions that Flowstone calls, as in https://docs.nvidia.com/cuda/cuda-driver-api/ (cuda.h of version
/// 13.0; all of them exist since 11.4).
struct CudaDriver {
    using Result = int;                  // CUresult
    using Address = unsigned long long;  // CUdeviceptr
    using Stream = void*;                // CUstream
    using Event = void*;                 // CUevent
    using Context = void*;               // CUcontext
    using Module = void*;                // CUmodule
    using Function = void*;              // CUfunction

    Result (*init)(unsigned flags);
    Result (*device_get)(int* device, int ordinal);
    Result (*pci_address)(char* text, int bytes, int device);
    Result (*retain_primary)(Context*, int device);
    Result (*release_primary)(int device);
    Result (*push_context)(Context);
    Result (*pop_context)(Context*);
    Result (*exchange_capture_mode)(int*);
    Result (*priority_range)(int* least, int* greatest);
    Result (*stream_create)(Stream*, unsigned flags, int priority);
    Result (*stream_destroy)(Stream);
    Result (*stream_capture_status)(Stream, int*);
    Result (*stream_synchronize)(Stream);
    Result (*stream_wait)(Stream, Event, unsigned flags);
    Result (*event_create)(Event*, unsigned flags);
    Result (*event_destroy)(Event);
    Result (*event_record)(Event, Stream);
    Result (*event_query)(Event);
    Result (*to_host)(void*, Address, std::size_t, Stream);
    Result (*from_host)(Address, const void*, std::size_t, Stream);
    Result (*copy_rows)(const CudaCopy2D*, Stream);
    Result (*pointer_attribute)(void* value, int attribute, Address);
    Result (*pin)(void*, std::size_t, unsigned flags);
    Result (*unpin)(void*);
    Result (*host_pointer)(Address*, void*, unsigned flags);
    Result (*host_alloc)(void**, std::size_t, unsigned flags);
    Result (*host_free)(void*);
    Result (*module_load)(Module*, const void* text);
    Result (*module_unload)(Module);
    Result (*module_function)(Function*, Module, const char* name);
    Result (*launch)(Function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                     unsigned threads_y, unsigned threads_z, unsigned shared_bytes, Stream, void** parameters,
                     void** extra);
    Result (*error_name)(Result, const char**);
};

// Of cuda.h.
inline constexpr int cuda_invalid_value = 1;                // CUDA_ERROR_INVALID_VALUE
inline constexpr int cuda_not_ready = 600;                  // CUDA_ERROR_NOT_READY
inline constexpr int cuda_capture_unsupported = 900;        // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
inline constexpr unsigned cuda_non_blocking = 1;            // CU_STREAM_NON_BLOCKING
inline constexpr unsigned cuda_event_without_timing = 2;    // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned cuda_pinned_for_all = 1;          // CU_MEMHOSTREGISTER_PORTABLE: for every context
inline constexpr unsigned cuda_pinned_mapped = 2;           // CU_MEMHOSTREGISTER_DEVICEMAP: kernels reach it
inline constexpr unsigned cuda_host_for_all = 1;            // CU_MEMHOSTALLOC_PORTABLE: pinned for every context
inline constexpr unsigned cuda_host_mapped = 2;  // CU_MEMHOSTALLOC_DEVICEMAP: kernels use the same address
inline constexpr int cuda_host_memory = 1;  // CU_MEMORYTYPE_HOST
inline constexpr int cuda_device_memory = 2;  // CU_MEMORYTYPE_DEVICE
inline constexpr int cuda_pointer_mapped = 13;  // CU_POINTER_ATTRIBUTE_MAPPED: there is memory at the address
inline constexpr int cuda_out_of_memory = 2;  // CUDA_ERROR_OUT_OF_MEMORY
inline constexpr int cuda_capture_relaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

/// The most batches in the stream at once, each followed by an event: far fewer than the driver accepts before a call
/// blocks, and enough to keep a copy engine busy.
inline constexpr std::size_t cuda_batches_max = 64;

/// The driver of this machine, loaded at the first call: nothing links to it. Throws std::system_error (ENOSYS).
const CudaDriver& cuda_driver();

/// A device that copies on a separate stream of GPU number `ordinal`. `driver` must outlive it. Throws
/// std::system_error: ENOSYS if the driver refuses; EAGAIN if there are too many threads. The destructor waits for all
/// copies.
std::shared_ptr<Device> make_cuda_device(const CudaDriver& driver, int ordinal, std::string name);

}  // namespace flowstone
