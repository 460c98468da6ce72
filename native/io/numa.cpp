#include "io/numa.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

namespace flowstone {

std::optional<cpu_set_t> processors_of(int node, const std::string& nodes) {
    std::ifstream file(nodes + "/node" + std::to_string(node) + "/cpulist");
    std::string list;
    if (node < 0 || !std::getline(file, list)) return std::nullopt;
    cpu_set_t found;
    CPU_ZERO(&found);
    const char* at = list.c_str();
    while (*at >= '0' && *at <= '9') {  // "0-31,64-95"
        char* end = nullptr;
        const unsigned long first = std::strtoul(at, &end, 10);
        const unsigned long last = *end == '-' ? std::strtoul(end + 1, &end, 10) : first;
        for (unsigned long one = first; one <= std::min<unsigned long>(last, CPU_SETSIZE - 1); ++one)
            CPU_SET(one, &found);
        at = *end == ',' ? end + 1 : end;
    }
    return CPU_COUNT(&found) != 0 ? std::optional(found) : std::nullopt;
}

int node_of(const std::string& pci_address, const std::string& devices) {
    std::ifstream file(devices + "/" + pci_address + "/numa_node");
    int node = -1;
    return !pci_address.empty() && file >> node ? node : -1;
}

cpu_set_t own_processors() {
    cpu_set_t found;
    CPU_ZERO(&found);
    (void)::sched_getaffinity(0, sizeof found, &found);  // if it fails the set is empty, and no thread is moved
    return found;
}

void keep_on(std::vector<std::jthread>& threads, const cpu_set_t& processors, const cpu_set_t& allowed) {
    cpu_set_t both;
    CPU_AND(&both, &processors, &allowed);
    if (CPU_COUNT(&both) == 0) return;
    for (std::jthread& thread : threads) (void)::pthread_setaffinity_np(thread.native_handle(), sizeof both, &both);
}

}  // namespace flowstone
