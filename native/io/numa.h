// NUMA nodes: which processors are near which memory and devices.
#pragma once

#include <sched.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace flowstone {

/// The processors of a NUMA node; nullopt if the system does not report them. `nodes`: the directory where it does.
std::optional<cpu_set_t> processors_of(int node, const std::string& nodes = "/sys/devices/system/node");

/// The NUMA node of a device; -1 if the system does not report it. `devices`: the directory where it does.
int node_of(const std::string& pci_address, const std::string& devices = "/sys/bus/pci/devices");

/// Processors that the calling thread may run on.
cpu_set_t own_processors();

/// Restrict running threads to `processors` that are also in `allowed`. A hint: if there are none, or the system
/// refuses, nothing changes.
void keep_on(std::vector<std::jthread>& threads, const cpu_set_t& processors, const cpu_set_t& allowed);

}  // namespace flowstone
