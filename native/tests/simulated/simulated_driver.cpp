#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>
// GCC 12 takes std::function in <regex> for uninitialized where a sanitizer is on (its bug 105562).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <regex>
#include <string>
#include <utility>

#include "tests/simulated/simulated_world.h"

namespace flowstone {

using namespace simulated;

/// The driver's functions.
struct SimulatedCalls {
    using Gpu = SimulatedGpu;
    using Result = CudaDriver::Result;

    static Gpu* current() { return current_contexts.empty() ? nullptr : current_contexts.back(); }

    /// What every call returns at once, if it is not 0. `unsafe`: a recording could take it for a part of it.
    static Result enter(bool unsafe) {
        if (current() == nullptr) return invalid_context;
        if (unsafe && is_prohibited()) return cuda_capture_unsupported;
        const std::lock_guard lock(current()->mutex_);
        return current()->error_;
    }

    static Result init(unsigned) { return success; }
    static Result device_get(int* device, int ordinal) {
        const std::lock_guard lock(world().mutex);
        *device = ordinal;
        return world().gpus.contains(ordinal) ? success : invalid_device;
    }
    static Result pci_address(char* text, int bytes, int) {
        std::snprintf(text, static_cast<std::size_t>(bytes), "0000:3B:00.0");
        return success;
    }
    static Result retain_primary(void** context, int device) {
        const std::lock_guard lock(world().mutex);
        *context = world().gpus.at(device);
        return success;
    }
    static Result release_primary(int) { return success; }
    static Result push_context(void* context) {
        current_contexts.push_back(static_cast<Gpu*>(context));
        return success;
    }
    static Result pop_context(void** context) {
        if (current() == nullptr) return invalid_context;
        *context = current();
        current_contexts.pop_back();
        return success;
    }
    static Result exchange_capture_mode(int* mode) {
        std::swap(*mode, capture_mode);
        return success;
    }
    static Result priority_range(int* least, int* greatest) {
        *least = 0, *greatest = -5;
        return enter(false);
    }
    static Result stream_create(void** stream, unsigned flags, int priority) {
        if (const Result error = enter(true)) return error;
        const std::lock_guard lock(current()->mutex_);
        if (current()->is_full_) return out_of_memory;
        current()->streams_.push_back(std::make_unique<Gpu::Stream>(Gpu::Stream{current(), flags, priority}));
        *stream = current()->streams_.back().get();
        return success;
    }
    static Result stream_destroy(void* stream) {
        if (current() == nullptr) return invalid_context;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        const auto is_it = [&](const auto& one) { return one.get() == stream && one->queue.empty() && !one->busy; };
        return gpu.streams_.remove_if(is_it) == 1 ? gpu.error_ : invalid_handle;
    }
    static Result stream_capture_status(void* stream, int* status) {
        if (const Result error = enter(false)) return error;
        auto* const one = static_cast<Gpu::Stream*>(stream);
        void* recording = nullptr;
        {
            const std::lock_guard lock(one->gpu->mutex_);
            recording = one->recording;
        }
        const std::lock_guard lock(world().mutex);
        *status = recording == nullptr ? 0 : world().recordings.at(recording).stands ? 1 : 2;
        return success;
    }
    static Result stream_synchronize(void* stream) {
        if (const Result error = enter(true)) return error;
        current()->synchronize(reinterpret_cast<std::uintptr_t>(stream));
        return enter(false);
    }
    static Result stream_wait(void* stream, void* event, unsigned) {
        if (const Result error = enter(false)) return error;
        auto* const later = static_cast<Gpu::Stream*>(stream);
        auto* const of = static_cast<Gpu::Event*>(event);
        Gpu::Item item;
        {
            const std::lock_guard lock(later->gpu->mutex_);
            if (of->captured) {
                later->recording = of->recording;
                return success;
            }
            if (of->over == nullptr || *of->over) return success;
            item.over = of->over;
            item.waits = true;
        }
        later->gpu->push(*later, std::move(item));
        return success;
    }
    static Result event_create(void** event, unsigned) {
        if (const Result error = enter(true)) return error;
        const std::lock_guard lock(current()->mutex_);
        if (current()->is_full_) return out_of_memory;
        current()->events_.push_back(std::make_unique<Gpu::Event>(Gpu::Event{current()}));
        *event = current()->events_.back().get();
        return success;
    }
    /// The event stays until the GPU goes: what was queued may refer to it.
    static Result event_destroy(void*) { return enter(false); }
    static Result event_record(void* event, void* stream) {
        if (const Result error = enter(false)) return error;
        auto* const of = static_cast<Gpu::Event*>(event);
        auto* const into = static_cast<Gpu::Stream*>(stream);
        if (of->gpu != into->gpu) return invalid_handle;
        Gpu::Item item;
        item.over = std::make_shared<bool>(false);
        std::shared_ptr<bool> before;
        {
            const std::lock_guard lock(into->gpu->mutex_);
            of->captured = into->recording != nullptr;
            of->recording = into->recording;
            if (of->captured) return success;
            before = std::exchange(of->over, item.over);
            into->gpu->pending_max_ = std::max(into->gpu->pending_max_, ++into->gpu->pending_);
        }
        try {
            into->gpu->push(*into, std::move(item));
        } catch (const std::bad_alloc&) {
            const std::lock_guard lock(into->gpu->mutex_);
            of->over = before;
            --into->gpu->pending_;
            throw;
        }
        return success;
    }
    static Result event_query(void* event) {
        if (const Result error = enter(true)) return error;
        auto* const of = static_cast<Gpu::Event*>(event);
        const std::lock_guard lock(of->gpu->mutex_);
        if (of->captured) return captured_event;
        return of->over == nullptr || *of->over ? success : cuda_not_ready;
    }
    static Result to_host(void* target, unsigned long long source, std::size_t bytes, void* stream) {
        if (const Result error = enter(false)) return error;
        return current()->push_copy(*static_cast<Gpu::Stream*>(stream),
                                    {static_cast<std::byte*>(target), source, bytes, true});
    }
    static Result from_host(unsigned long long target, const void* source, std::size_t bytes, void* stream) {
        if (const Result error = enter(false)) return error;
        auto* const host = const_cast<std::byte*>(static_cast<const std::byte*>(source));
        return current()->push_copy(*static_cast<Gpu::Stream*>(stream), {host, target, bytes, false});
    }
    static Result copy_rows(const CudaCopy2D* copy, void* stream) {
        if (const Result error = enter(false)) return error;
        if (copy->source_x + copy->source_y + copy->target_x + copy->target_y != 0)
            return invalid_value;  // of no use to a copy of ours
        Gpu& gpu = *current();
        auto& into = *static_cast<Gpu::Stream*>(stream);
        if (copy->source_kind == cuda_host_memory && copy->target_kind == cuda_device_memory)
            return gpu.push_copy(
                into,
                {const_cast<std::byte*>(static_cast<const std::byte*>(copy->source_host)), copy->target_device,
                 copy->width, false, copy->height, copy->source_pitch, copy->target_pitch});
        if (copy->source_kind != cuda_device_memory || copy->target_kind != cuda_host_memory) return invalid_value;
        return gpu.push_copy(into,
                             {static_cast<std::byte*>(copy->target_host), copy->source_device, copy->width, true,
                              copy->height, copy->target_pitch, copy->source_pitch});
    }
    /// Only of the attribute that is used.
    static Result pointer_attribute(void* value, int attribute, unsigned long long address) {
        if (const Result error = enter(false)) return error;
        Gpu& gpu = *current();
        if (attribute != cuda_pointer_mapped || address < gpu.address() || address - gpu.address() >= gpu.bytes_)
            return invalid_value;
        const std::lock_guard lock(gpu.mutex_);
        const int is_mapped = gpu.is_there(address - gpu.address(), 1);
        std::memcpy(value, &is_mapped, sizeof is_mapped);
        return success;
    }
    static Result host_pointer(unsigned long long* address, void* memory, unsigned flags) {
        if (const Result error = enter(false)) return error;
        if (flags != 0) return invalid_value;
        Gpu& gpu = *current();
        auto* const host = static_cast<std::byte*>(memory);
        const auto holds = [&](const auto& range) { return range.first <= host && host < range.first + range.second; };
        const std::lock_guard lock(gpu.mutex_);
        const bool is_pinned = std::any_of(gpu.pins_.begin(), gpu.pins_.end(), holds);
        if (!is_pinned && std::none_of(gpu.host_memory_.begin(), gpu.host_memory_.end(), holds)) return invalid_value;
        *address = reinterpret_cast<std::uintptr_t>(host) + (is_pinned ? pinned_skew : 0);
        return success;
    }
    static Result pin(void* memory, std::size_t bytes, unsigned flags) {
        if (const Result error = enter(true)) return error;
        if (flags != (cuda_pinned_for_all | cuda_pinned_mapped)) return invalid_value;
        Gpu& gpu = *current();
        auto* const begin = static_cast<std::byte*>(memory);
        const std::lock_guard lock(gpu.mutex_);
        if (std::any_of(gpu.streams_.begin(), gpu.streams_.end(),
                        [](const auto& stream) { return !stream->others && !stream->queue.empty(); }))
            ++gpu.pins_beside_copies_;
        const auto overlaps = [&](const auto& pin) {
            return pin.first < begin + bytes && begin < pin.first + pin.second;
        };
        if (std::any_of(gpu.pins_.begin(), gpu.pins_.end(), overlaps)) return already_pinned;
        if (bytes > gpu.pinned_max_ - std::min(gpu.pinned_max_, gpu.pinned_bytes_)) return out_of_memory;
        gpu.pins_.emplace_back(begin, bytes);
        gpu.pinned_bytes_ += bytes;
        ++gpu.pins_made_;
        return success;
    }
    /// After an error, too, nothing refers to the memory any more.
    static Result unpin(void* memory) {
        if (current() == nullptr) return invalid_context;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        const auto found =
            std::find_if(gpu.pins_.begin(), gpu.pins_.end(), [&](const auto& pin) { return pin.first == memory; });
        assert(found != gpu.pins_.end());
        gpu.pinned_bytes_ -= found->second;
        gpu.pins_.erase(found);
        return gpu.error_;
    }
    static Result host_alloc(void** memory, std::size_t bytes, unsigned flags) {
        if (const Result error = enter(true)) return error;
        if (flags != (cuda_host_for_all | cuda_host_mapped) || bytes == 0) return invalid_value;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        if (bytes > gpu.pinned_max_ - std::min(gpu.pinned_max_, gpu.pinned_bytes_ + gpu.host_bytes_))
            return out_of_memory;
        auto* const begin = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{4096}));
        std::memset(begin, 0xCD, bytes);
        gpu.host_memory_.emplace(begin, bytes);
        gpu.host_bytes_ += bytes;
        ++gpu.host_allocations_;
        *memory = begin;
        return success;
    }
    static Result host_free(void* memory) {
        if (current() == nullptr) return invalid_context;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        const auto found = gpu.host_memory_.find(static_cast<std::byte*>(memory));
        if (found == gpu.host_memory_.end()) return invalid_value;
        gpu.host_bytes_ -= found->second;
        gpu.host_memory_.erase(found);
        ::operator delete(memory, std::align_val_t{4096});
        return gpu.error_;
    }
    static Result module_load(void** module, const void* text) {
        if (const Result error = enter(true)) return error;
        Gpu& gpu = *current();
        auto made = std::make_unique<Gpu::Module>();
        {
            const std::lock_guard lock(gpu.mutex_);
            if (gpu.refuses_modules_) return invalid_text;
            if (gpu.is_full_) return out_of_memory;
        }
        const std::string ptx(static_cast<const char*>(text));
        static const std::regex entry_text(R"(\.visible \.entry (\w+)\(([^)]*)\)\s*(?:\.maxntid (\d+), 1, 1)?)"),
            parameter_text(R"(\.param \.u(32|64) \w+)");
        if (!std::regex_search(ptx, std::regex(R"(^\s*\.version 6\.0\s+\.target sm_50\s+\.address_size 64)")))
            return invalid_text;
        for (std::sregex_iterator one(ptx.begin(), ptx.end(), entry_text), end; one != end; ++one) {
            Gpu::Module::Entry entry{made.get(), (*one)[1], {}};
            if ((*one)[3].matched) entry.threads_max = std::stoul((*one)[3]);
            const std::string parameters = (*one)[2];
            for (std::sregex_iterator each(parameters.begin(), parameters.end(), parameter_text); each != end; ++each)
                entry.parameters.push_back((*each)[1] == "64" ? 8 : 4);
            made->entries.push_back(std::move(entry));
        }
        const std::lock_guard lock(gpu.mutex_);
        *module = made.get();
        gpu.modules_.push_back(std::move(made));
        return success;
    }
    static Result module_unload(void* module) {
        if (current() == nullptr) return invalid_context;
        Gpu& gpu = *current();
        const std::lock_guard lock(gpu.mutex_);
        return gpu.modules_.remove_if([&](const auto& one) { return one.get() == module; }) == 1 ? gpu.error_
                                                                                                 : invalid_handle;
    }
    static Result module_function(void** function, void* module, const char* name) {
        if (const Result error = enter(false)) return error;
        for (Gpu::Module::Entry& entry : static_cast<Gpu::Module*>(module)->entries) {
            if (entry.name != name) continue;
            *function = &entry;
            return success;
        }
        return not_found;
    }
    static Result launch(void* function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                         unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters,
                         void** extra) {
        if (const Result error = enter(false)) return error;
        if (function == nullptr) return invalid_handle;
        const std::uint64_t threads = std::uint64_t{threads_x} * threads_y * threads_z;
        if (blocks_x == 0 || blocks_y != 1 || blocks_z != 1 || threads == 0 || threads > 1024 || shared_bytes != 0 ||
            extra != nullptr)
            return invalid_value;
        Gpu& gpu = *current();
        const auto& entry = *static_cast<Gpu::Module::Entry*>(function);
        if (threads > entry.threads_max) return invalid_value;
        {
            const std::lock_guard lock(gpu.mutex_);
            if (!entry.module->is_loaded && gpu.is_full_) return out_of_memory;
            entry.module->is_loaded = true;
            ++gpu.module_launches_;
        }
        std::vector<std::uint64_t> values;
        for (std::size_t i = 0; i < entry.parameters.size(); ++i)
            std::memcpy(&values.emplace_back(0), parameters[i], entry.parameters[i]);
        using Kernel = int (Gpu::*)(std::uint64_t, std::uint64_t, std::uint32_t) const;
        static const std::map<std::string, std::pair<Kernel, bool>> kernels{
            // and whether its blocks are of warps
            {"flowstone_gather", {&Gpu::gather, false}},
            {"flowstone_pack", {&Gpu::pack, false}},
            {"flowstone_digest", {&Gpu::digest, true}},
            {"flowstone_digest_strided", {&Gpu::digest_strided, true}}};
        const auto known = kernels.find(entry.name);
        if (known == kernels.end() || values.size() != 3 || (known->second.second && threads % 32 != 0))
            return invalid_value;
        const bool packs = entry.name == "flowstone_pack";
        const auto rows = static_cast<std::uint32_t>(values[2]);
        const std::uint64_t copied_bytes = packs ? gpu.packed_bytes(values[0], rows) : 0;
        if (packs && !static_cast<Gpu::Stream*>(stream)->others) {
            const std::lock_guard lock(gpu.mutex_);
            gpu.packed_blocks_max_ = std::max<std::uint64_t>(gpu.packed_blocks_max_, blocks_x);
        }
        return gpu.launch_module(
            *static_cast<Gpu::Stream*>(stream),
            [&gpu, values, rows, kernel = known->second.first] { return (gpu.*kernel)(values[0], values[1], rows); },
            true, copied_bytes);
    }
    static Result error_name(Result error, const char** name) {
        static const std::map<int, const char*> names{
            {1, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},
            {201, "CUDA_ERROR_INVALID_CONTEXT"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
            {719, "CUDA_ERROR_LAUNCH_FAILED"},   {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
        const auto found = names.find(error);
        *name = found == names.end() ? nullptr : found->second;
        return found == names.end() ? invalid_value : success;
    }
};

/// A call that finds no memory returns that, as the driver's do, and has changed nothing.
template <auto Call> struct Refusing;
template <class... Arguments, CudaDriver::Result (*Call)(Arguments...)> struct Refusing<Call> {
    static CudaDriver::Result call(Arguments... arguments) {
        try {
            return Call(arguments...);
        } catch (const std::bad_alloc&) { return out_of_memory; }
    }
};

const CudaDriver& simulated_driver() {
    using Calls = SimulatedCalls;
    static const CudaDriver driver{
        .init = &Refusing<&Calls::init>::call,
        .device_get = &Refusing<&Calls::device_get>::call,
        .pci_address = &Refusing<&Calls::pci_address>::call,
        .retain_primary = &Refusing<&Calls::retain_primary>::call,
        .release_primary = &Refusing<&Calls::release_primary>::call,
        .push_context = &Refusing<&Calls::push_context>::call,
        .pop_context = &Refusing<&Calls::pop_context>::call,
        .exchange_capture_mode = &Refusing<&Calls::exchange_capture_mode>::call,
        .priority_range = &Refusing<&Calls::priority_range>::call,
        .stream_create = &Refusing<&Calls::stream_create>::call,
        .stream_destroy = &Refusing<&Calls::stream_destroy>::call,
        .stream_capture_status = &Refusing<&Calls::stream_capture_status>::call,
        .stream_synchronize = &Refusing<&Calls::stream_synchronize>::call,
        .stream_wait = &Refusing<&Calls::stream_wait>::call,
        .event_create = &Refusing<&Calls::event_create>::call,
        .event_destroy = &Refusing<&Calls::event_destroy>::call,
        .event_record = &Refusing<&Calls::event_record>::call,
        .event_query = &Refusing<&Calls::event_query>::call,
        .to_host = &Refusing<&Calls::to_host>::call,
        .from_host = &Refusing<&Calls::from_host>::call,
        .copy_rows = &Refusing<&Calls::copy_rows>::call,
        .pointer_attribute = &Refusing<&Calls::pointer_attribute>::call,
        .pin = &Refusing<&Calls::pin>::call,
        .unpin = &Refusing<&Calls::unpin>::call,
        .host_pointer = &Refusing<&Calls::host_pointer>::call,
        .host_alloc = &Refusing<&Calls::host_alloc>::call,
        .host_free = &Refusing<&Calls::host_free>::call,
        .module_load = &Refusing<&Calls::module_load>::call,
        .module_unload = &Refusing<&Calls::module_unload>::call,
        .module_function = &Refusing<&Calls::module_function>::call,
        .launch = &Refusing<&Calls::launch>::call,
        .error_name = &Refusing<&Calls::error_name>::call,
    };
    return driver;
}

}  // namespace flowstone
