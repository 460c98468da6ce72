// The engine's copies on a simulated GPU.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tests/simulated/simulated_gpu.h"

namespace flowstone {

/// "delayed:0": what make_cuda_device makes, and the GPU that it copies from and to.
class DelayedDevice final : public SimulatedGpu, public Device {
public:
    /// `refuses`: kernels.
    DelayedDevice(std::uint64_t bytes, std::chrono::microseconds delay, bool refuses = false)
        : SimulatedGpu(bytes, delay) {
        if (refuses) refuse_modules();
        copier_ = make_cuda_device(simulated_driver(), ordinal(), "delayed:0");
    }

    void submit(std::unique_ptr<CopyBatch> batch) noexcept override { copier_->submit(std::move(batch)); }
    int follow(std::uintptr_t stream) override { return copier_->follow(stream); }
    int lead(std::uintptr_t stream, Copies copies = Copies::all) override { return copier_->lead(stream, copies); }
    bool is_recording(std::uintptr_t stream) override { return copier_->is_recording(stream); }
    int gather(std::uintptr_t stream, std::span<const DeviceRun> runs,
               std::shared_ptr<const GatheredRuns>& gathered) override {
        return copier_->gather(stream, runs, gathered);
    }
    bool packs() const override { return copier_->packs(); }
    int digest(std::uintptr_t stream, std::span<const DeviceRun> runs,
               std::shared_ptr<const DeviceDigests>& digested) override {
        return copier_->digest(stream, runs, digested);
    }
    void reserve_launches(const LaunchNeeds& needs, std::size_t times) override {
        copier_->reserve_launches(needs, times);
    }
    int pin(std::byte* memory, std::uint64_t bytes) override { return copier_->pin(memory, bytes); }
    void unpin(std::byte* memory) override { copier_->unpin(memory); }
    std::string name() const override { return copier_->name(); }
    std::string pci_address() const override { return copier_->pci_address(); }
    std::string describe(int error) const override { return copier_->describe(error); }

private:
    std::shared_ptr<Device> copier_;  // goes before the GPU
};

}  // namespace flowstone
