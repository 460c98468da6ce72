// Which processors are near a part of the machine's memory.
#pragma once

#include <sched.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace flowstone {

/// The processors of a NUMA node; none if the system does not tell them. `nodes`: where it does.
std::optional<cpu_set_t> processors_of(int node, const std::string& nodes = "/sys/devices/system/node");

/// The NUMA node of a device; -1 if the system does not tell it. `devices`: where it does.
int node_of(const std::string& pci_address, const std::string& devices = "/sys/bus/pci/devices");

/// Processors that the calling thread may run on.
cpu_set_t own_processors();

/// Let running threads be on those of the processors that `allowed` has, too. If there are none, or the system refuses, they
/// stay where they are: this is a hint.
void keep_on(std::vector<std::jthread>& threads, const cpu_set_t& processors, const cpu_set_t& allowed);

}  // namespace flowstone
